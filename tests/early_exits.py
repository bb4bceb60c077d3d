# SPDX-License-Identifier: Apache-2.0
"""Engines that draft with their first layers, and what they ought to say."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from depth_routing import model_runner
from oracle import log_softmax
from safetensors.numpy import save_file
from scipy.stats import chisquare, norm
from scoring import assert_scores, params, prompt, random_ids
from tiny_models import CONFIGS

TIE = 1e-4
"""Greedy tokens may differ where logits differ by less, in float32."""
FAMILIES = (
    "deep_llama",
    "deep_mistral",
    "deep_qwen2",
    "deep_qwen3",
    "deep_qwen3_moe",
    "deep_gemma3",
    "deep_opt",
)


VOCABULARY = CONFIGS["deep_llama"].vocab_size
HIDDEN = CONFIGS["deep_llama"].hidden_size


STEPS = {
    "v1": dict(max_num_seqs=256, max_num_batched_tokens=1024),
    "v2": dict(max_num_seqs=64),
}
"""Of an engine of which many tokens are drawn: most of a small step is overhead, but in
Triton's interpreter, which takes its time for each row."""


def options(exit_layer: int | list[int] = 2, num_drafts: int = 3, **others) -> "Options":
    """`speculative_config` of an engine."""
    return Options(
        method="early_exit",
        exit_layer=exit_layer,
        num_speculative_tokens=num_drafts,
        **others,
    )


def start(engine, speculative, family: str = "deep_llama", **others):
    """The `engine` fixture's engine that drafts, with small steps and blocks."""
    defaults = dict(max_num_batched_tokens=64, block_size=32)
    return engine(family, speculative_config=speculative, **defaults | others)


class Options(dict):
    """Lets the `engine` fixture tell engines apart by options of options."""

    def __hash__(self) -> int:
        return hash(repr(sorted(self.items())))


@dataclass
class Watched:
    """What an engine drafted."""

    counts: list[int] = field(default_factory=list)  # of each request and round
    exits: list[int] = field(default_factory=list)  # the same: how many layers drafted
    tokens: list[list[int]] = field(default_factory=list)  # the same; -1 where none
    resumed: int = 0  # steps that began after the first layers
    looked_up: int = 0  # requests' rounds whose drafts were looked up


@contextmanager
def watched(llm) -> Iterator[Watched]:
    """Watches an engine in this process (reaches into its private parts)."""
    early_exit = model_runner(llm).depth_router
    found = Watched()
    plan, draft, look_up = early_exit.plan, early_exit.draft, early_exit.look_up

    def watching_plan(step, batch):
        plan(step, batch)
        found.resumed += step.forward is not None

    def watching(batch, *args):
        drafts = draft(batch, *args)
        found.counts += drafts.counts[batch.reqs].tolist()
        found.exits += [early_exit.first_layers.exit_layer] * len(batch.reqs)
        found.tokens += drafts.tokens[batch.reqs].tolist()
        return drafts

    def watching_lookup(*args):
        drafts = look_up(*args)
        found.looked_up += len(drafts)
        return drafts

    early_exit.plan, early_exit.draft = watching_plan, watching
    early_exit.look_up = watching_lookup
    try:
        yield found
    finally:
        del early_exit.plan, early_exit.draft, early_exit.look_up


def fastest(gate, best: int) -> list[int]:
    """Gives a gate a clock by which a round of one way takes a ninth of the others'.

    Returns:
        Its ways by round, which grows.
    """
    gate.sizes, gate.round = {}, None
    chosen, time = [], 0

    def now() -> int:
        nonlocal time
        if gate.round is not None:
            chosen.append(gate.round.way)
            time += 1 if gate.round.way == best else 9
        return time

    gate._now = now
    return chosen


def assert_greedy(oracle, ids: list[int], completion, count: int, pick=None) -> None:
    """Asserts `count` tokens, each the most probable after the others, up to ties.

    Args:
        pick: [vocabulary] float64, added to the logits.
    """
    answer = list(completion.token_ids)
    assert len(answer) == count
    logits = oracle.logits(ids + answer)[len(ids) - 1 : -1]
    if pick is not None:
        logits = logits + pick
    chosen = np.take_along_axis(logits, np.array(answer)[:, None], axis=1)[:, 0]
    assert (chosen >= logits.max(axis=1) - TIE).all()


def assert_preempted(llm, oracle, count: int, monkeypatch) -> None:
    """Asserts greedy tokens of `count` requests for which the cache has no room at once
    (reaches into private parts)."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def watching(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", watching)
    prompts = [random_ids(70 + n, VOCABULARY, 60) for n in range(count)]
    for ids, completion in zip(prompts, generate(llm, prompts, params(50))):
        assert_greedy(oracle, ids, completion, 50)
    assert preempted, "the cache was large enough"


def assert_others_go_on(llm, oracle) -> None:
    """Asserts greedy tokens of requests beside some that are aborted, and of new ones,
    which are scored too. One of these has the name of a request that has gone."""
    engine = llm.llm_engine
    gone = [f"gone {n}" for n in range(3)]
    stay = {f"stay {n}": random_ids(80 + n, VOCABULARY, 15 + n) for n in range(3)}
    late = {
        name: random_ids(60 + n, VOCABULARY, 50 + n)
        for n, name in enumerate(["gone 0", "late 1", "late 2"])
    }
    for n, (name, ids) in enumerate(stay.items()):
        engine.add_request(gone[n], prompt(random_ids(90 + n, VOCABULARY, 20)), params(100))
        engine.add_request(name, prompt(ids), params(30))
    outputs = {}

    def step():
        for output in engine.step():
            outputs[output.request_id] = output

    for _ in range(4):
        step()
    engine.abort_request(gone)
    for name, ids in late.items():
        engine.add_request(name, prompt(ids, ids[-3:]), params(12))
        step()
    while engine.has_unfinished_requests():
        step()
    for name, ids in stay.items():
        assert_greedy(oracle, ids, outputs[name].outputs[0], 30)
    for name, ids in late.items():
        assert_greedy(oracle, ids, outputs[name].outputs[0], 12)
        assert_scores(outputs[name].target_logprobs, oracle, ids, ids[-3:])


def pvalue(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts, [tokens], with rare tokens taken together. 1 if all are
    rare."""
    common = expected >= 5
    if common.all():
        return chisquare(counts, expected).pvalue
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    return chisquare(counts, expected).pvalue if len(counts) > 1 else 1.0


def surprise(model, ids: list[int], answers: np.ndarray, temperature: float) -> float:
    """The probability of as much: of how probable drawn tokens are, all together.

    That is normal by the central limit.
    """
    distance = variance = 0.0
    for answer in answers.tolist():
        logits = model.logits(ids + answer)[len(ids) - 1 : -1]
        logprobs = log_softmax(logits / temperature)
        probs = np.exp(logprobs)
        means = (probs * logprobs).sum(axis=1)
        distance += (logprobs[range(len(answer)), answer] - means).sum()
        variance += (probs * (logprobs - means[:, None]) ** 2).sum()
    return 2 * norm.sf(abs(distance) / variance**0.5)


def random_prompts(count: int, vocabulary: int, longest: int, seed: int = 0):
    """Prompts of 1 to `longest` random tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [rng.integers(2, vocabulary, length).tolist() for length in lengths]


def generate(llm, prompts, sampling):
    """Completions, one a prompt, of one or several `SamplingParams`."""
    outputs = llm.generate([prompt(ids) for ids in prompts], sampling, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def assert_drafts(llm, oracle, seed: int) -> Watched:
    """Asserts greedy tokens of prompts in chunks beside requests that decode, in batches of
    all sizes up to 10."""
    prompts = random_prompts(10, VOCABULARY, 120, seed)
    with watched(llm) as drafted:
        completions = generate(llm, prompts, params(12))
    assert drafted.resumed > 0
    for ids, completion in zip(prompts, completions):
        assert_greedy(oracle, ids, completion, 12)
    return drafted


def save_calibration(path, hidden: int, cutoffs: list[int], num_layers: int):
    """A file of random translators and probes: drafts are bad, of uneven numbers."""
    rng = np.random.default_rng(0)
    count, width = len(cutoffs), 8

    def random(*shape: int, spread: float = 1.0) -> np.ndarray:
        return (spread * rng.standard_normal((count, *shape))).astype(np.float32)

    tensors = {
        "translator_weight": np.eye(hidden, dtype=np.float32)
        + random(hidden, hidden, spread=0.1 / hidden**0.5),
        "translator_bias": random(hidden, spread=0.1),
        "translator_weight_1": random(width, hidden),
        "translator_bias_1": random(width),
        "translator_weight_2": random(hidden, width, spread=0.1),
    }
    for name in ("probe", "acceptance_greedy", "acceptance_sampled"):
        tensors |= {
            f"{name}_weight_1": random(width, hidden, spread=hidden**-0.5),
            f"{name}_bias_1": random(width),
            f"{name}_weight_2": random(width, spread=2.0),
            f"{name}_bias_2": random() + 1,
        }
    metadata = {
        "format": "utio-calibration-2",
        "cutoffs": ",".join(map(str, cutoffs)),
        "num_layers": str(num_layers),
    }
    save_file(tensors, path, metadata)
    return path


@pytest.fixture(scope="session")
def calibration(tmp_path_factory) -> str:
    """A random one, for the exits of the `deep_` models."""
    folder = tmp_path_factory.mktemp("early_exit")
    return str(save_calibration(folder / "random.safetensors", HIDDEN, [1, 2, 4], 6))
