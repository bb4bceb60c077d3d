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
    perplexity,
    score_named,
    score_prompt_logprobs,
    took,
)
from files import EXAMPLES, Files, held_out
from rows import Row

LM_EVAL = EXAMPLES / "lm_eval"
BUDGET = {
    "perplexity": 8,
    "whole vocabulary": 4,
    "shared context": 10,
    "multiple choice": 8,
}
"""Seconds in which the ways take turns."""
WINDOWS, WINDOW = 2, 512
FEW = 16
"""Positions of which the whole vocabulary is asked for: an object a token each."""
ANSWERS, ANSWER, CONTEXT = 64, 8, 97
QUESTIONS, SHOTS = 4, 5


def run(files: Files) -> Iterator[Row]:
    """Yields a row for each comparison."""
    sys.path.append(str(LM_EVAL))
    from utio_model import UTIO

    ours = UTIO(
        **{"pretrained" if name == "model" else name: value
           for name, value in options(str(files.model), max_logprobs=-1).items()},
        max_model_len=1024,
        batch_size="auto",
    )  # fmt: skip
    llm = ours.model
    tokenizer = llm.get_tokenizer()
    texts = held_out(files.archive)
    tokens = [tokenizer.encode(text, verbose=False) for text in texts]
    warm_up(llm, tokens)
    yield score_text(llm, tokens)
    yield few_positions(llm, tokens)
    yield shared_context(llm, tokens)
    yield multiple_choice(ours, files)


def warm_up(llm, tokens: list[list[int]]) -> None:
    prompts = [ids[:64] for ids in tokens if len(ids) >= 64][:2]
    score_named(llm, prompts, 32)
    score_prompt_logprobs(llm, prompts, 32)
    score_prompt_logprobs(llm, prompts[:1], 32, top=1)


def score_text(llm, tokens: list[list[int]]) -> Row:
    """Perplexity: every token but the first of a window."""
    windows = [ids[:WINDOW] for ids in tokens if len(ids) >= WINDOW][:WINDOWS]
    rows = WINDOW - 1
    upstream, fork = by_turns(
        (
            lambda: score_prompt_logprobs(llm, windows, rows),
            lambda: score_named(llm, windows, rows),
        ),
        BUDGET["perplexity"],
        llm.reset_prefix_cache,
    )
    theirs, ours = upstream.answers[-1], fork.answers[-1]
    return Row(
        f"Perplexity of {theirs.size:,} held-out tokens",
        f"prompt_logprobs=0\n{took(upstream.seconds)}",
        f"target_token_ids\n{took(fork.seconds)}",
        over(upstream.seconds, fork.seconds),
        "as fast",
        f"perplexity {perplexity(theirs):.4f} and {perplexity(ours):.4f}; "
        f"tokens {differ(theirs, ours)}",
    )


def few_positions(llm, tokens: list[list[int]]) -> Row:
    """The same by asking for the whole vocabulary."""
    (window,) = [ids[: FEW + 1] for ids in tokens if len(ids) > FEW][:1]
    upstream, fork = by_turns(
        (
            lambda: score_prompt_logprobs(llm, [window], FEW, top=-1),
            lambda: score_named(llm, [window], FEW),
        ),
        BUDGET["whole vocabulary"],
        llm.reset_prefix_cache,
    )
    theirs, ours = upstream.answers[-1], fork.answers[-1]
    return Row(
        f"The same at {FEW} positions, against all log-probabilities of the vocabulary",
        f"prompt_logprobs=-1\n{took(upstream.seconds)}",
        f"target_token_ids\n{took(fork.seconds)}",
        over(upstream.seconds, fork.seconds),
        "as fast",
        differ(theirs, ours),
    )


def shared_context(llm, tokens: list[list[int]]) -> Row:
    """Answers to one context. `prompt_logprobs` does not read the prefix cache."""
    flat = [i for ids in tokens for i in ids]
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
    theirs, ours = upstream.answers[-1], fork.answers[-1]
    return Row(
        f"{ANSWERS} answers of {ANSWER} tokens to one context of {CONTEXT}",
        f"prompt_logprobs=0\n{took(upstream.seconds)}",
        f"target_token_ids,\nprefix cache\n{took(fork.seconds)}",
        over(upstream.seconds, fork.seconds),
        "as fast",
        f"sums {differ(theirs.sum(1), ours.sum(1))}; same best answer"
        if theirs.sum(1).argmax() == ours.sum(1).argmax()
        else f"sums {differ(theirs.sum(1), ours.sum(1))}; ANOTHER best answer",
    )


def multiple_choice(ours, files: Files) -> Row:
    """lm-eval's requests, by its own `vllm` model and by this fork's."""
    from lm_eval.models.vllm_causallms import VLLM

    theirs = copy.copy(ours)  # the same engine and tokenizer
    theirs.__class__ = VLLM
    requests = choice_requests(files)
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
        f"Multiple choice by lm-eval: {QUESTIONS} questions, 4 answers, {SHOTS} shots",
        f"lm-eval's vllm model\n{took(upstream.seconds)}",
        f"model utio\n{took(fork.seconds)}",
        over(upstream.seconds, fork.seconds),
        "as fast",
        f"the same choice in {same} of {QUESTIONS}; sums {differ(*sums)}",
    )


def choice_requests(files: Files) -> list:
    """Which of four lines comes next? As lm-eval builds it, shots and all."""
    from lm_eval.tasks import TaskManager

    name = "held_out_next_line_same_shots"
    manager = TaskManager(include_path=str(LM_EVAL / "tasks"))
    task = manager.load([name])["tasks"][name]
    task.set_config("num_fewshot", SHOTS)
    task.build_all_requests(limit=QUESTIONS, rank=0, world_size=1)
    return task.instances
