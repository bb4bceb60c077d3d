# SPDX-License-Identifier: Apache-2.0
"""Random requests to engines that draft, look up, route and keep scores, with too little
KV cache for all of them: each against Hugging Face in float32.

`EVERYTHING_BATCHES` and `EVERYTHING_SEED` run more and others.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
from depth_routing import NUM_LAYERS
from early_exits import VOCABULARY, assert_greedy, options, start
from oracle import log_softmax
from scoring import assert_generated, assert_scores, params, prompt, random_ids, run

BATCHES = {
    runner: int(os.environ.get("EVERYTHING_BATCHES", default))
    for runner, default in (("v1", 3), ("v2", 2))
}
SEED = int(os.environ.get("EVERYTHING_SEED", 0))
REQUESTS = 14  # of a batch; six run at once
ATOL = 3e-4  # of a float32 log-probability
CUTOFFS = (2, 4)
ENGINES = {
    "gate": ("deep_llama", dict(draft_gate=True), {}),
    "lookup": ("deep_gemma3", dict(prompt_lookup_max=3), {}),
    "routing": (
        "deep_llama",
        dict(draft_gate=True, prompt_lookup_max=3),
        dict(enable_utio=True, utio_bucket_cutoffs=CUTOFFS, utio_min_batch_size=2),
    ),
}


@dataclass
class Case:
    """A request, and what of its answer is known."""

    ids: list[int]
    max_tokens: int
    targets: list[list[int]] | None = None
    prompt_logprobs: int | None = None
    sampling: dict = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """All its tokens run all layers."""
        return self.sampling.get("max_depth", NUM_LAYERS) == NUM_LAYERS

    @property
    def is_greedy(self) -> bool:
        changes = {"temperature", "repetition_penalty", "min_tokens"}
        return not changes & self.sampling.keys()


def random_case(rng: np.random.Generator, earlier: list[list[int]], routes: bool) -> Case:
    """A prompt, which may begin as an earlier one, and some of all there is to ask."""

    def maybe(chance: float) -> bool:
        return rng.random() < chance

    def some_ids(*shape: int) -> list:
        return rng.integers(0, VOCABULARY, shape).tolist()

    ids = random_ids(int(rng.integers(2**31)), VOCABULARY, int(rng.integers(1, 90)))
    if earlier and maybe(0.5):
        base = earlier[rng.integers(len(earlier))]
        ids = (base[: rng.integers(1, len(base) + 1)] + ids)[:120]
    earlier.append(ids)
    case = Case(ids, int(rng.integers(1, 24)))
    if len(ids) > 1 and maybe(0.25):
        case.targets = some_ids(int(rng.integers(1, len(ids))), int(rng.integers(1, 6)))
        case.max_tokens *= maybe(0.7)
    elif maybe(0.3):
        case.prompt_logprobs = int(rng.integers(6))
    if case.max_tokens == 0:
        return case
    sampling = case.sampling
    if maybe(0.5):
        asked: dict = {"token_ids": some_ids(int(rng.integers(4)))}
        if maybe(0.4):
            asked["top_k"] = int(rng.integers(1, 9))
        if maybe(0.3):
            asked["temperature"] = float(rng.choice([0.5, 2.0]))
        sampling["target_generated"] = asked
    if maybe(0.3):
        sampling["logprobs"] = int(rng.integers(5))
    if maybe(0.5):
        sampling["temperature"] = float(rng.choice([0.7, 1.0, 1.5]))
        sampling["n"] = 1 + maybe(0.3)
        if maybe(0.5):
            sampling["seed"] = int(rng.integers(1000))
    if maybe(0.2):
        sampling["repetition_penalty"] = 1.3
    if maybe(0.2):
        sampling["min_tokens"] = int(rng.integers(case.max_tokens + 1))
    if maybe(0.2):
        sampling["stop_token_ids"] = some_ids(40)
    if routes:
        sampling["max_depth"] = int(rng.choice([*CUTOFFS, NUM_LAYERS]))
    return case


def assert_logprobs(found: list[dict], tokens: list[int], logits: np.ndarray) -> None:
    """Asserts what is said of each token and of the most probable ones beside it."""
    logp = log_softmax(logits)
    assert len(found) == len(tokens) == len(logp)
    for said, token, expected in zip(found, tokens, logp):
        assert token in said
        for each, one in said.items():
            assert abs(one.logprob - expected[each]) < ATOL


def check(case: Case, output, oracle) -> None:
    if case.targets is None:
        assert output.target_logprobs is None
    else:
        assert_scores(output.target_logprobs, oracle, case.ids, case.targets)
    if case.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        logits = oracle.logits(case.ids)[:-1]
        assert_logprobs(output.prompt_logprobs[1:], case.ids[1:], logits)
    assert len(output.outputs) == case.sampling.get("n", 1)
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        if case.max_tokens == 0 or "stop_token_ids" not in case.sampling:
            assert len(tokens) == case.max_tokens
        assert bool(tokens) == (case.max_tokens > 0)
        if not tokens or not case.is_exact:
            continue
        if (asked := case.sampling.get("target_generated")) is not None:
            assert_generated(completion, oracle, case.ids, asked)
        if "logprobs" in case.sampling:
            logits = oracle.logits(case.ids + tokens)[len(case.ids) - 1 : -1]
            assert_logprobs(completion.logprobs, tokens, logits)
        if case.is_greedy:
            assert_greedy(oracle, case.ids, completion, len(tokens))


@pytest.mark.parametrize("name", ENGINES)
def test_random_requests(engine, oracle, runner, name):
    family, drafts, others = ENGINES[name]
    llm = start(
        engine,
        options(2, 2, **drafts),
        family,
        max_num_seqs=6,
        num_gpu_blocks_override=24,
        max_model_len=256,
        **others,
    )
    rng = np.random.default_rng([SEED, list(ENGINES).index(name)])
    for _ in range(BATCHES[runner]):
        earlier: list[list[int]] = []
        cases = [random_case(rng, earlier, "enable_utio" in others) for _ in range(REQUESTS)]
        requests = [prompt(case.ids, case.targets) for case in cases]
        sampling = [
            params(case.max_tokens, prompt_logprobs=case.prompt_logprobs, **case.sampling)
            for case in cases
        ]
        for case, output in zip(cases, run(llm, requests, sampling)):
            check(case, output, oracle(family))
