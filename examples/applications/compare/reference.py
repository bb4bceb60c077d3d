# SPDX-License-Identifier: Apache-2.0
"""What is kept of the reference model, and how a model is compared with it.

For each scored position: the K most probable tokens with their exact log-probabilities,
M tokens drawn from all others with theirs, the log-probability of the token that is
there, and the probability of all tokens but the K. So it does not grow with the
vocabulary, and a model is compared by scoring K + M + 1 tokens by name.
"""

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from compare.divergence import (
    Comparison,
    all_finite,
    divergence,
    divergence_of_fewer,
    estimate_tail,
    mean,
    tail_mass,
    terms,
)
from compare.windows import Window

if TYPE_CHECKING:
    from vllm import LLM

FORMAT = "kld-reference-1"
TOKENS_PER_STEP = 1024
"""Default of `--max-num-batched-tokens`. Finding the candidates holds, in vLLM, the
logits of a whole step, several times over."""
SEED = 0  # of the draws from the tail


class Refused(Exception):
    """What the caller asked for can not be done; the message says why."""


class Reference(NamedTuple):
    """N positions, in the order of the windows."""

    windows: list[Window]
    candidates: np.ndarray  # [N, K] integer, most probable first
    logprobs: np.ndarray  # [N, K] float32, nats
    tail_mass: np.ndarray  # [N] float64, probability of all other tokens
    tail_samples: np.ndarray  # [N, M] integer, drawn uniformly from all other tokens
    tail_logprobs: np.ndarray  # [N, M] float32, nats
    next_logprobs: np.ndarray  # [N] float32, of the token that is there
    metadata: dict[str, str]


def describe(llm: "LLM") -> dict[str, str]:
    """What the engine runs, and what its token ids mean."""
    import vllm

    config = llm.model_config
    vocabulary = sorted(llm.get_tokenizer().get_vocab().items())
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    return {
        "model": str(config.model),
        "model_type": str(config.hf_text_config.model_type),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization),
        "vocabulary": str(config.get_vocab_size()),
        "tokenizer_sha256": sha256(json.dumps(vocabulary).encode()),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "vllm": vllm.__version__,
    }


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def check_same_vocabulary(
    ours: dict[str, str], theirs: dict[str, str], name: str = "--model"
) -> None:
    """Raises `Refused` unless an id means the same token to both models."""
    for key, what in (("vocabulary", "vocabulary"), ("tokenizer_sha256", "tokenizer")):
        if ours[key] != theirs[key]:
            raise Refused(
                f"{name} {ours['model']} and --reference, of {theirs['model']}, do "
                f"not have the same {what}: {ours[key]}, {theirs[key]}"
            )


def check_same_vllm(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Raises `Refused` if another release scored what is there: a difference of the
    models would be one of the programs too."""
    if ours["vllm"] != theirs["vllm"]:
        raise Refused(
            f"this is vLLM {ours['vllm']}, the reference was scored by "
            f"{theirs['vllm']}; name another folder, or --restart"
        )


def make_reference(
    llm: "LLM", windows: list[Window], top_k: int, samples: int, call: int = 0
) -> Reference:
    """Finds each position's `top_k` most probable tokens, draws `samples` others, and
    scores all by name, as `compare_with` will: the same computation, the same bits.
    Log-probabilities may be NaN.

    Args:
        call: number of this call, which the draws depend on.
    """
    metadata = {"format": FORMAT} | describe(llm)
    vocabulary = int(metadata["vocabulary"])
    top = find_candidates(llm, windows, top_k)
    generator = np.random.default_rng([SEED, call])
    tail = draw_from_tail(generator, top, vocabulary, samples)
    logprobs, _ = score(llm, windows, np.concatenate([top, tail], axis=1))
    of_top = logprobs[:, 1 : 1 + top_k]
    order = np.argsort(-of_top, axis=1, kind="stable")
    top, of_top = (np.take_along_axis(x, order, axis=1) for x in (top, of_top))
    of_tail = logprobs[:, 1 + top_k :]
    return Reference(
        windows, top, of_top, tail_mass(of_top), tail, of_tail, logprobs[:, 0], metadata
    )


def check_no_nan(*columns: np.ndarray) -> None:
    """Raises `Refused` if there is a NaN in the columns, `[N]` or `[N, ...]`."""
    if broken := int(np.isnan(np.column_stack(columns)).any(axis=1).sum()):
        raise Refused(f"the model's log-probabilities are NaN at {broken} positions")


def draw_from_tail(
    generator: np.random.Generator, top: np.ndarray, vocabulary: int, samples: int
) -> np.ndarray:
    """Ids `[N, samples]`, independent and uniform among those not in `top` `[N, K]`;
    `[N, 0]` if there are none."""
    count, top_k = top.shape
    if top_k == vocabulary:
        return np.zeros((count, 0), top.dtype)
    drawn = generator.integers(0, vocabulary - top_k, (count, samples))
    # The r-th id outside a sorted set is r plus the members before it, of which the
    # i-th is one if it is at most r + i.
    before = np.sort(top, axis=1) - np.arange(top_k)
    shifts = [np.searchsorted(row, r, side="right") for row, r in zip(before, drawn)]
    return drawn + np.array(shifts)


def find_candidates(llm: "LLM", windows: list[Window], top_k: int) -> np.ndarray:
    """Ids `[N, top_k]` of the most probable tokens at the scored positions.

    A window's last token need not be there to be predicted: its candidates are those
    of the token that vLLM samples.
    """
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        logprobs=top_k,
        flat_logprobs=True,  # lists of numbers, no object a token
        detokenize=False,
    )
    prompts = [TokensPrompt(prompt_token_ids=w.token_ids[:-1]) for w in windows]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    ids = []
    for output, window in zip(outputs, windows):
        # Each position has the token that is there, then the top_k; the first, none.
        flat = [*output.prompt_logprobs.token_ids, *output.outputs[0].logprobs.token_ids]
        ids.append(np.array(flat).reshape(-1, 1 + top_k)[-window.scored :, 1:])
    return np.concatenate(ids)


def score(
    llm: "LLM", windows: list[Window], named: np.ndarray, backwards: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Scores, at each position, the token that is there and those in `named` `[N, K]`.

    Args:
        backwards: submit the last window first, so that batches are others.

    Returns:
        Log-probabilities, float32 in nats, and ranks, both `[N, 1 + K]`.
    """
    from vllm import SamplingParams, TokensPrompt

    prompts, begin = [], 0
    for ids, scored in windows:
        rows = named[begin : begin + scored].astype(np.int32)
        targets = np.column_stack([np.array(ids[-scored:], np.int32), rows])
        prompts.append(TokensPrompt(prompt_token_ids=ids, target_token_ids=targets))
        begin += scored
    step = -1 if backwards else 1
    params = SamplingParams(max_tokens=0)
    outputs = llm.generate(prompts[::step], params, use_tqdm=False)[::step]
    scores = [output.target_logprobs for output in outputs]
    return (
        np.concatenate([s.logprobs for s in scores]),
        np.concatenate([s.ranks for s in scores]),
    )


def named(reference: Reference) -> np.ndarray:
    """Ids `[N, K + M]` to score, besides the token that is there."""
    return np.concatenate([reference.candidates, reference.tail_samples], axis=1)


def compare_with(
    llm: "LLM", reference: Reference, backwards: bool = False
) -> Comparison:
    """Has the model score what the reference names, and takes the divergences."""
    scores = score(llm, reference.windows, named(reference), backwards)
    return compare(reference, *scores)


def compare(
    reference: Reference, logprobs: np.ndarray, ranks: np.ndarray
) -> Comparison:
    """Takes the divergences.

    Args:
        logprobs, ranks: `[N, 1 + K + M]`, what `score` gives for `named(reference)`.
    """
    p, p_tail = reference.logprobs, reference.tail_mass
    top_k = p.shape[1]
    q = logprobs[:, 1 : 1 + top_k]
    q_tail = tail_mass(q)
    kl = divergence(p, p_tail, q, q_tail)
    outside = int(reference.metadata["vocabulary"]) - top_k
    rest, variance = estimate_tail(
        reference.tail_logprobs, logprobs[:, 1 + top_k :], outside
    )
    estimate = terms(p, q).sum(axis=1) + rest
    keep = all_finite(reference.next_logprobs, logprobs[:, 0], kl, estimate)
    of_fewer = divergence_of_fewer(p[keep], p_tail[keep], q[keep], q_tail[keep])
    return Comparison(
        kl, of_fewer | {top_k: mean(kl[keep])}, estimate, variance, q_tail,
        ranks[:, 1] == 1, logprobs[:, 0], ranks[:, 0],
    )  # fmt: skip
