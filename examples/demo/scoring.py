# SPDX-License-Identifier: Apache-2.0
"""Three jobs of scoring on one engine: perplexity, a shared context, multiple choice."""

import copy
import sys
from collections.abc import Iterator

import numpy as np
from engine import (
    by_turns,
    differ,
    options,
    over,
    peak,
    perplexity,
    prefill,
    score_named,
    score_prompt_logprobs,
    took,
)
from files import EXAMPLES, LONGEST, Files, tokens
from rows import Row, ratio

LM_EVAL = EXAMPLES / "lm_eval"
BUDGET = {"perplexity": 10, "shared context": 10, "multiple choice": 8}
"""Seconds in which the ways take turns."""
RESOLUTION = 16
"""MiB: what the memory allocator keeps or gives back moves a peak by this."""
ANSWERS, ANSWER, CONTEXT = 64, 6, 65
QUESTIONS, SHOTS = 3, 5


def run(files: Files) -> Iterator[list[Row]]:
    """Yields the rows of each part."""
    sys.path.append(str(LM_EVAL))
    from utio_model import UTIO

    ours = UTIO(
        **{"pretrained" if name == "model" else name: value
           for name, value in options(str(files.model)).items()},
        max_model_len=LONGEST + 1,
        batch_size="auto",
        # Upstream's own way, to compare with. By default it gains from this fork, too.
        bounded_prompt_logprobs=False,
    )  # fmt: skip
    llm = ours.model
    texts = tokens(files)
    warm_up(llm, texts)
    yield score_text(llm, texts)
    yield [shared_context(llm, texts)]
    yield [multiple_choice(ours)]


def warm_up(llm, texts: list[list[int]]) -> None:
    prompts = [ids[:64] for ids in texts if len(ids) >= 64][:2]
    score_named(llm, prompts, 32)
    score_prompt_logprobs(llm, prompts, 32)


def score_text(llm, texts: list[list[int]]) -> list[Row]:
    """Perplexity: every token but the first. Its time and its memory."""
    text = next(ids for ids in texts if len(ids) == LONGEST)
    prefilled, _ = peak(lambda: prefill(llm, text))
    # Upstream's way last: what it leaves behind would hide what the other takes.
    fork, upstream = by_turns(
        (
            lambda: peak(lambda: score_named(llm, [text], LONGEST - 1)),
            lambda: peak(lambda: score_prompt_logprobs(llm, [text], LONGEST - 1)),
        ),
        BUDGET["perplexity"],
        llm.reset_prefix_cache,
    )
    (fork_peak, ours), (upstream_peak, theirs) = fork.answers[0], upstream.answers[0]
    upstream_memory = (upstream_peak - prefilled) / 2**20
    fork_memory = (fork_peak - prefilled) / 2**20
    unseen = fork_memory < RESOLUTION
    least = max(fork_memory, RESOLUTION)
    how = "prompt_logprobs=0 against target_token_ids"
    return [
        Row(
            f"Perplexity of {theirs.size:,} tokens",
            took(upstream.seconds),
            took(fork.seconds),
            ratio(over(upstream.seconds, fork.seconds)),
            [
                how,
                f"{perplexity(theirs):.4f} and {perplexity(ours):.4f}; "
                f"log-probabilities {differ(theirs, ours)}",
            ],
        ),
        Row(
            "Its peak memory, above prefill's",
            f"{upstream_memory:,.0f} MiB",
            f"{'< ' * unseen}{least:,.0f} MiB",
            f"{'> ' * unseen}{upstream_memory / least:.0f}×",
            ["the first grows with the tokens of a step, the second does not"],
        ),
    ]


def shared_context(llm, texts: list[list[int]]) -> Row:
    """Answers to one context. `prompt_logprobs` does not read the prefix cache."""
    flat = [i for ids in texts for i in ids]
    context, rest = flat[:CONTEXT], flat[CONTEXT:]
    prompts = [
        context + rest[n * ANSWER : (n + 1) * ANSWER] for n in range(ANSWERS)
    ]
    upstream, fork = by_turns(
        (
            lambda: score_prompt_logprobs(llm, prompts, ANSWER),
            lambda: score_named(llm, prompts, ANSWER),
        ),
        BUDGET["shared context"],
        llm.reset_prefix_cache,
    )
    theirs, ours = (way.answers[-1].sum(1) for way in (upstream, fork))
    same = "the same best" if theirs.argmax() == ours.argmax() else "ANOTHER BEST"
    return Row(
        f"{ANSWERS} answers to one context",
        took(upstream.seconds),
        took(fork.seconds),
        ratio(over(upstream.seconds, fork.seconds)),
        [
            f"{ANSWER} tokens each after {CONTEXT}; the fork prefills the context once",
            f"{same} answer; sums {differ(theirs, ours)}",
        ],
    )


def multiple_choice(ours) -> Row:
    """lm-eval's requests, by its own `vllm` model and by this fork's."""
    from lm_eval.models.vllm_causallms import VLLM

    theirs = copy.copy(ours)  # the same engine and tokenizer
    theirs.__class__ = VLLM
    requests = choice_requests()
    upstream, fork = by_turns(
        (
            lambda: theirs.loglikelihood(requests, disable_tqdm=True),
            lambda: ours.loglikelihood(requests, disable_tqdm=True),
        ),
        BUDGET["multiple choice"],
        ours.model.reset_prefix_cache,
    )
    sums = [
        np.array([total for total, _ in way.answers[-1]]) for way in (upstream, fork)
    ]
    choices = [side.reshape(-1, 4).argmax(1) for side in sums]
    same = int((choices[0] == choices[1]).sum())
    return Row(
        f"lm-eval, {QUESTIONS} questions of 4 choices",
        took(upstream.seconds),
        took(fork.seconds),
        ratio(over(upstream.seconds, fork.seconds)),
        [
            f"{SHOTS} shots; its model `vllm` against this fork's `utio`",
            f"the same choice in {same} of {QUESTIONS}; sums {differ(*sums)}",
        ],
    )


def choice_requests() -> list:
    """Which of four lines comes next? As lm-eval builds it, shots and all."""
    from lm_eval.tasks import TaskManager

    name = "held_out_next_line_same_shots"
    # Without lm-eval's own tasks, which take seconds to list.
    manager = TaskManager(include_path=str(LM_EVAL / "tasks"), include_defaults=False)
    task = manager.load([name])["tasks"][name]
    task.set_config("num_fewshot", SHOTS)
    task.build_all_requests(limit=QUESTIONS, rank=0, world_size=1)
    return task.instances
