# SPDX-License-Identifier: Apache-2.0
"""The mathematics, the draw and the journal of `examples/applications/dual_vllm`,
without a model.

The oracle knows the whole vocabulary, and finds alpha with a minimizer.
"""

import asyncio
import json
import math
import os
import re
import sys
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from failing_server import FailingServer, Reply
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from tokenizers import Tokenizer, decoders, models

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from common import Journal, JournalError, Model
from dual_vllm import ClientError, CoordinatorConfig, DualVLLMCoordinator, drawn, tilted
from dual_vllm import __main__ as program
from dual_vllm.coordinator import LOG_ZERO, GenerationOutput, Sample, end_ids
from dual_vllm.launch import (
    REFERENCE_MODEL,
    LaunchError,
    LocalServer,
    first_layers,
    share_cores,
)
from dual_vllm.replay import record, replay
from dual_vllm.server import Answer, Server, TopK

VOCABULARY = 300
ROUNDING = 1e-5
"""What `tilted.ROUNDING`, counted as mass, can move a probability or a divergence."""


def make_pair(seed: int) -> np.ndarray:
    """Log-probabilities `[2, VOCABULARY]` of two models, of all kinds: flat and peaked,
    alike and not."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=VOCABULARY)
    own = rng.normal(size=(2, VOCABULARY))
    likeness = rng.choice([0.0, 0.5, 0.9, 0.99])
    logits = rng.choice([0.5, 2.0, 8.0]) * (likeness * common + (1 - likeness) * own)
    return log_softmax(logits, axis=-1)


def solve(logprobs: np.ndarray) -> tuple[float, np.ndarray, float]:
    """alpha, q and the divergence over a whole vocabulary."""
    found = minimize_scalar(
        lambda a: logsumexp((1 - a) * logprobs[0] + a * logprobs[1]),
        bounds=(0, 1),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return (
        found.x,
        softmax((1 - found.x) * logprobs[0] + found.x * logprobs[1]),
        (-found.fun),
    )


def likely(logprobs: np.ndarray, k: int) -> np.ndarray:
    """The `k` most likely ids of either model."""
    return np.union1d(*np.argsort(-logprobs, axis=-1)[:, :k])


@pytest.mark.parametrize("seed", range(20))
def test_alpha_balances_the_divergences(seed):
    logprobs = make_pair(seed)
    alpha = tilted.solve_alpha(logprobs)
    expected, q, kl = solve(logprobs)
    assert alpha == pytest.approx(expected, abs=1e-5)
    found, log_z = tilted.tilt(logprobs, alpha)
    np.testing.assert_allclose(found, q, atol=1e-6)
    kl_a, kl_b = (found * (np.log(found) - logprobs)).sum(axis=1)
    assert abs(kl_a - kl_b) < 1e-9
    assert kl_a == pytest.approx(-log_z, abs=1e-9) == pytest.approx(kl, abs=1e-9)


def test_alpha_of_equal_models():
    logprobs = np.repeat(make_pair(0)[:1], 2, axis=0)
    assert tilted.solve_alpha(logprobs) == 0.5


@pytest.mark.parametrize(
    "logprobs",
    [
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1]],  # nothing in common
        [[1 - 1e-6, 1e-6, 0.0, 0.0], [0.0, 1e-6, 1 - 1e-6, 0.0]],
        [[0.97, 0.01, 0.01, 0.01], [0.97, 0.01, 0.01 + 1e-9, 0.01 - 1e-9]],
    ],
    ids=["apart", "nearly apart", "nearly the same"],
)
def test_alpha_of_extremes(logprobs):
    with np.errstate(divide="ignore"):
        known = tilted.with_rest(np.maximum(np.log(logprobs), LOG_ZERO))
    alpha = tilted.solve_alpha(known)
    q = tilted.tilt(known, alpha)[0]
    assert 0 <= alpha <= 1
    assert abs(q @ (known[1] - known[0])) < 1e-6
    bound = tilted.bounds(known, alpha)
    assert 0 <= bound.total_variation <= 1 and 0 <= bound.kl < math.inf


@pytest.mark.parametrize("k", [1, 5, 20, 100])
def test_bounds_hold(k):
    """Against the whole vocabulary, the rest left out or drawn."""
    tight = 0
    for seed in range(200):
        logprobs = make_pair(seed)
        _, q, kl = solve(logprobs)
        ids = likely(logprobs, k)
        known = tilted.with_rest(logprobs[:, ids])
        alpha = tilted.solve_alpha(known)
        bound = tilted.bounds(known, alpha)
        left_out = np.zeros(VOCABULARY)
        left_out[ids] = tilted.tilt(known[:, :-1], alpha)[0]
        of_all = tilted.tilt(logprobs, alpha)[0]
        for found in (left_out, of_all):
            assert abs(found - q).sum() / 2 <= bound.total_variation + ROUNDING
        estimate = -tilted.estimate_log_z(known, alpha)
        assert abs(estimate - kl) <= bound.kl + ROUNDING
        tight += abs(left_out - q).sum() / 2 > bound.total_variation / 10
    assert tight > 20, "a bound that is never near says little"


def test_bounds_close_when_all_is_known():
    logprobs = make_pair(3)
    known = tilted.with_rest(logprobs)
    bound = tilted.bounds(known, tilted.solve_alpha(known))
    assert bound.total_variation < 1e-3 and bound.kl < 1e-5


def test_effective_sample_size():
    """Against importance weights of a large sample from q, of models alike enough
    that the sample settles."""
    rng = np.random.default_rng(1)
    logprobs = log_softmax(rng.normal(size=(2, VOCABULARY)), axis=-1)
    q = solve(logprobs)[1]
    drawn = np.random.default_rng(0).choice(VOCABULARY, size=200_000, p=q)
    weights = np.exp(logprobs[:, drawn]) / q[drawn]
    expected = weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1) / len(drawn)
    found = tilted.effective_sample_size(logprobs, q)
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_effective_sample_size_without_a_token_that_neither_has():
    logprobs = np.log([[0.5, 0.5, 1e-300], [0.4, 0.6, 1e-300]])
    q = np.array([0.45, 0.55, 0.0])
    expected = tilted.effective_sample_size(logprobs[:, :2], q[:2])
    logprobs[:, 2] = LOG_ZERO
    with np.errstate(all="raise", under="ignore"):
        found = tilted.effective_sample_size(logprobs, q)
    np.testing.assert_allclose(found, expected)


def test_a_text_begins_as_it_does_after_the_prompt():
    """With decoders that leave out the first space of what they are given."""
    words = {"▁a": 0, "▁b": 1, "c": 2}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "b"
    dual = SimpleNamespace(tokenizer=tokenizer)
    for prompt, ids, text in (([0], [1], " b"), ([0] * 9, [2, 1], "c b"), ([0], [], "")):
        output = GenerationOutput(0, prompt, ids)
        DualVLLMCoordinator.set_text(dual, output)
        assert output.text == text


def test_noise_is_gumbel_and_belongs_to_the_token():
    noise = tilted.Noise(1, 2, 3)
    ids = np.arange(100_000)
    values = noise.of(ids)
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-3
    np.testing.assert_array_equal(noise.of(ids[::-7]), values[::-7])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        correlation = np.corrcoef(values, tilted.Noise(*other).of(ids))[0, 1]
        assert abs(correlation) < 0.02, other
    loud = noise.loudest(len(ids), 3.0)
    assert set(loud) == set(ids[values >= 3.0])
    assert (np.diff(values[loud]) <= 0).all()


class Offline(DualVLLMCoordinator):
    """Knows the vocabulary without a tokenizer; `draw` answers from arrays."""

    vocabulary = VOCABULARY
    max_model_len = 10**6

    def draw(self, logprobs: np.ndarray, number: int) -> tuple[int, int]:
        """A token of sample `number`, and the rounds of requests it took."""
        sample = Sample(GenerationOutput(number, [5]))
        order = np.argsort(-logprobs, axis=-1)[:, : self.config.top_k]
        tops = [TopK(ids, row[ids]) for ids, row in zip(order, logprobs)]
        nothing = np.empty(0)
        pair = tuple(Answer(nothing, math.nan, top) for top in tops)
        assert self._advance(sample, pair) is None
        for rounds in range(1, 20):
            ids = sample.guess.unknown
            assert 0 < len(ids) <= self.config.max_candidates
            pair = tuple(Answer(row[ids], 0.0, top) for row, top in zip(logprobs, tops))
            step = self._advance(sample, pair)
            if step is not None:
                return step.token_id, rounds
        raise AssertionError("no token after 19 rounds")


def offline(**settings) -> Offline:
    return Offline(
        CoordinatorConfig(
            url_a="http://a",
            url_b="http://b",
            ignore_eos=True,
            max_tokens=2,
            **settings,
        )
    )


def named(logprobs: np.ndarray, top_k: int, tail_mass: float = 0, **_) -> int:
    """How many tokens one model names."""
    mass = 0.0
    for count, prob in enumerate(sorted(np.exp(logprobs), reverse=True), start=1):
        mass += prob
        if count == top_k or (tail_mass and mass >= 1 - tail_mass):
            return count
    raise AssertionError


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 4, "max_candidates": 40},
        {"top_k": 20},
        {"top_k": 60, "tail_mass": 0.3},
    ],
    ids=str,
)
def test_the_rest_is_drawn_as_if_all_were_known(settings):
    """The token is that of the whole vocabulary, though few tokens are scored."""
    dual = offline(**settings)
    tail = rounds = 0
    for seed in range(150):
        logprobs = make_pair(seed)
        sizes = [named(row, **settings) for row in logprobs]
        ids = np.union1d(*(np.argsort(-r)[:n] for r, n in zip(logprobs, sizes)))
        alpha = tilted.solve_alpha(tilted.with_rest(logprobs[:, ids]))
        value = (1 - alpha) * logprobs[0] + alpha * logprobs[1]
        value += tilted.Noise(0, seed, 0).of(np.arange(VOCABULARY))
        token, used = dual.draw(logprobs, seed)
        assert token == value.argmax()
        tail += token not in ids
        rounds += used
    assert tail > 5, "the rest was never drawn"
    assert rounds < 3 * 150


def test_draws_follow_q():
    """Chi-square of 3,000 draws from one pair of models, with few candidates."""
    logprobs = make_pair(2)
    dual = offline(top_k=10)
    ids = likely(logprobs, 10)
    alpha = tilted.solve_alpha(tilted.with_rest(logprobs[:, ids]))
    q = tilted.tilt(logprobs, alpha)[0]
    drawn = [dual.draw(logprobs, number)[0] for number in range(3000)]
    found = np.bincount(drawn, minlength=VOCABULARY)
    often = q * len(drawn) >= 5
    found = [*found[often], found[~often].sum()]
    expected = [*q[often], q[~often].sum()] * np.array(len(drawn))
    assert stats.chisquare(found, expected).pvalue > 1e-3


def test_rest_left_out():
    dual = offline(top_k=5, tail="drop")
    for seed in range(100):
        logprobs = make_pair(seed)
        token, rounds = dual.draw(logprobs, seed)
        assert token in likely(logprobs, 5) and rounds == 1


def test_fewer_candidates_where_the_models_are_sure():
    flat, peaked = np.zeros((2, VOCABULARY)), np.zeros((2, VOCABULARY))
    peaked[:, 7] = 12
    dual = offline(top_k=100, tail_mass=0.01)
    sizes = []
    for logits in (flat, peaked):
        order = np.argsort(-logits[0], kind="stable")[:100]
        sizes.append(dual._size(TopK(order, log_softmax(logits[0])[order])))
    assert sizes == [100, 1]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 300}, "top_k"),
        ({"tail": "cut"}, "tail"),
        ({"tail_mass": 1.0}, "tail_mass"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_token": 5}, "max_token"),
        ({"patience": 0}, "patience"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids"),
    ],
)
def test_wrong_settings_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        CoordinatorConfig(url_a="http://a", url_b="http://b", **settings)


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of a model with this generation_config.json, or with none; its
    tokenizer's end-of-sequence token is 0."""

    def make(name: str, content: object = None) -> str:
        path = tmp_path / name
        path.mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (path / file).symlink_to(REFERENCE_MODEL / file)
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / "generation_config.json").write_text(text)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {0}),
        ({}, {0}),
        ({"eos_token_id": None}, {0}),
        ({"eos_token_id": 5}, {0, 5}),
        ({"eos_token_id": [5, 9]}, {0, 5, 9}),
    ],
)
def test_end_of_sequence_of_a_model(folder, content, expected):
    assert end_ids(folder("model", content)) == expected


def test_end_of_sequence_of_a_model_without_a_tokenizer(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert end_ids(str(tmp_path)) == {5}


def test_end_of_sequence_of_a_model_elsewhere(caplog):
    assert end_ids("/nowhere/model") == set()
    assert "'/nowhere/model' is not here" in caplog.text
    assert "stop_token_ids" in caplog.text


@pytest.mark.parametrize(
    "content", ["{", "[]", {"eos_token_id": "5"}, {"eos_token_id": [5, True]}]
)
def test_broken_generation_config(folder, content):
    path = folder("model", content)
    with pytest.raises(ClientError, match=f"generation_config.json of '{path}'"):
        end_ids(path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0, 5, 7, 9}),
        ({"stop_token_ids": [12, 5]}, {0, 5, 7, 9, 12}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [12]}, {12}),
    ],
    ids=str,
)
def test_where_a_sample_stops(folder, settings, expected):
    """At the end-of-sequence tokens of both models; the token is no text."""
    roots = [folder("a", {"eos_token_id": 7}), folder("b", {"eos_token_id": [5, 9]})]
    config = CoordinatorConfig(
        url_a="http://a", url_b="http://b", max_tokens=2, **settings
    )
    dual = Offline(config)
    for server, root in zip(dual.servers, roots):
        server.model = Model("m", root, 100)
    assert dual.stop_ids == expected
    stopped = 0
    for number in range(40):
        # These and one other token are all that is likely.
        logprobs = np.full((2, VOCABULARY), -10.0)
        logprobs[:, [0, 5, 7, 9, 12, 20]] = 0
        sample = Sample(GenerationOutput(number, [3]))
        step = draw_step(dual, sample, log_softmax(logprobs, axis=-1))
        reason = "stop" if step.token_id in expected else None
        assert step.finish_reason == sample.output.finish_reason == reason
        assert len(sample.output.diagnostics) == 1
        dual.set_text(sample.output)
        assert (sample.output.text == "") == (reason == "stop" or step.token_id == 0)
        stopped += reason == "stop"
    assert (stopped > 0) == bool(expected)


MODELS = [Model("a", "/models/a", 100), Model("b", "/models/b", 100)]


@pytest.fixture
def journal_path(tmp_path) -> Path:
    """A journal of two samples, one finished after two tokens."""
    path = tmp_path / "run.jsonl"
    dual = offline(top_k=20)
    samples = make_samples()
    with Journal(path) as journal:
        assert len(drawn.resume(journal, {"seed": 0}, MODELS, samples)) == 2
        for sample, count in zip(samples, (2, 1)):
            drawn.append(journal, [draw_step(dual, sample) for _ in range(count)])
    return path


def make_samples() -> list[Sample]:
    return [Sample(GenerationOutput(n, [5, 6 + n])) for n in range(2)]


def draw_step(dual: Offline, sample: Sample, logprobs: np.ndarray | None = None):
    if logprobs is None:
        logprobs = make_pair(len(sample.output.token_ids))
    order = np.argsort(-logprobs, axis=-1)[:, : dual.config.top_k]
    tops = [TopK(ids, row[ids]) for ids, row in zip(order, logprobs)]
    step = None
    while step is None:
        ids = sample.guess.unknown if sample.guess else np.empty(0, int)
        step = dual._advance(
            sample, tuple(Answer(r[ids], 1.5, t) for r, t in zip(logprobs, tops))
        )
    return step


def test_journal_goes_on(journal_path):
    samples = make_samples()
    with Journal(journal_path) as journal:
        again = [model._replace(max_model_len=200) for model in MODELS]
        assert drawn.resume(journal, {"seed": 0}, again, samples) == deque(samples[1:])
    assert [len(s.output.token_ids) for s in samples] == [2, 1]
    assert [s.output.finish_reason for s in samples] == ["length", None]
    assert samples[0].output.diagnostics[0].entropy_a == 1.5


def test_journal_drops_a_line_that_was_cut(journal_path):
    whole = journal_path.read_bytes()
    for cut in (1, 20):
        journal_path.write_bytes(whole[:-cut])
        samples = make_samples()
        with Journal(journal_path) as journal:
            drawn.resume(journal, {"seed": 0}, MODELS, samples)
        assert [len(s.output.token_ids) for s in samples] == [2, 0]
        assert len(journal_path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    ("settings", "token", "message"),
    [({"seed": 1}, 6, "seed"), ({"seed": 0}, 9, "prompts")],
)
def test_journal_of_another_run(journal_path, settings, token, message):
    samples = make_samples()
    samples[0].output.prompt_token_ids[1] = token
    before = journal_path.read_bytes()
    with Journal(journal_path) as journal, pytest.raises(JournalError, match=message):
        drawn.resume(journal, settings, MODELS, samples)
    assert journal_path.read_bytes() == before


@pytest.mark.parametrize("change", [{"name": "c"}, {"root": "/models/c"}], ids=str)
def test_journal_of_another_model(journal_path, change):
    before = journal_path.read_bytes()
    models = [MODELS[0], MODELS[1]._replace(**change)]
    message = "differs in models"
    with Journal(journal_path) as journal, pytest.raises(JournalError, match=message):
        drawn.resume(journal, {"seed": 0}, models, make_samples())
    assert journal_path.read_bytes() == before


def test_journal_whose_header_was_cut(journal_path):
    """Nothing was drawn then, so it is written again."""
    header = journal_path.read_bytes().splitlines(keepends=True)[0]
    for cut in (0, 10, len(header) - 1):
        journal_path.write_bytes(header[:cut])
        with Journal(journal_path) as journal:
            assert len(drawn.resume(journal, {"seed": 0}, MODELS, make_samples())) == 2
        assert journal_path.read_bytes() == header


def test_journal_in_use(journal_path):
    with Journal(journal_path), pytest.raises(JournalError, match="Another run uses"):
        Journal(journal_path).__enter__()


@pytest.mark.parametrize(
    "content",
    ["no json\n", '{"a": 1}\n', "5\n", '{"a": 1}', "{}\nand a line without end", "\n"],
)
def test_no_journal(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with Journal(path) as journal, pytest.raises(JournalError):
        drawn.resume(journal, {"seed": 0}, MODELS, make_samples())
    assert path.read_text() == content


class Prepared(Offline):
    """Connects to two servers that answer from arrays."""

    tokenizer = SimpleNamespace(
        eos_token_id=0, encode=lambda text: [5, 6], decode=lambda ids, **_: str(ids)
    )
    sizes: list[int]
    """Samples that were asked for at once, of the last round."""

    def __init__(self, config: CoordinatorConfig):
        super().__init__(config)
        for server, model in zip(self.servers, MODELS):
            server.model = model
        self.sizes = []

    async def _both(self, call) -> list:
        return [await call(PreparedServer()) for _ in self.servers]

    async def _ask(self, active: list[Sample]) -> list[list[Answer]]:
        self.sizes.append(len(active))
        await asyncio.sleep(0)
        answers = []
        for sample in active:
            logprobs = make_pair(len(sample.ids))
            order = np.argsort(-logprobs, axis=-1)[:, : self.config.top_k]
            ids = sample.guess.unknown if sample.guess else np.empty(0, int)
            tops = [TopK(row, logs[row]) for row, logs in zip(order, logprobs)]
            answers.append([Answer(r[ids], 0.0, t) for r, t in zip(logprobs, tops)])
        return [*zip(*answers)]


class PreparedServer:
    """What is asked of a server on connecting."""

    connect = AsyncMock()
    ask = AsyncMock()

    async def tokenize(self, text: str) -> list[int]:
        return Prepared.tokenizer.encode(text)

    async def detokenize(self, ids: list[int]) -> str:
        return Prepared.tokenizer.decode(ids)


@pytest.fixture
def sample_all(tmp_path, monkeypatch):
    """Runs the command's part that draws; gives outputs and coordinators."""

    def run(count: int, coordinators: int, out: str = "out", **settings):
        duals = []

        def make(config):
            duals.append(Prepared(config))
            return duals[-1]

        monkeypatch.setattr(program, "DualVLLMCoordinator", make)
        config = CoordinatorConfig(
            url_a="http://a", url_b="http://b", max_tokens=4, **settings
        )
        prompts = [[5, 6 + n] for n in range(count)]
        path = tmp_path / out
        return asyncio.run(program.sample(config, prompts, path, coordinators)), duals

    return run


@pytest.mark.parametrize(
    ("count", "coordinators", "batch_size", "expected"),
    [
        (5, 1, 32, [5]),
        (8, 2, 32, [4, 4]),
        (9, 2, 32, [5, 4]),
        (2, 3, 32, [1, 1, None]),
        (20, 2, 4, [4, 4]),
    ],
)
def test_coordinators_share_the_samples(
    sample_all, count, coordinators, batch_size, expected
):
    alone, _ = sample_all(count, 1, "alone", ignore_eos=True)
    outputs, duals = sample_all(
        count, coordinators, ignore_eos=True, batch_size=batch_size
    )
    assert [dual.sizes[0] if dual.sizes else None for dual in duals] == expected
    assert all(max(dual.sizes, default=0) <= batch_size for dual in duals)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]


def test_a_run_goes_on_with_the_same_stop_tokens(sample_all, tmp_path):
    outputs, _ = sample_all(3, 1)
    for same in ({"stop_token_ids": [0]}, {"stop_token_ids": [0, 0]}):
        again, duals = sample_all(3, 1, **same)
        assert again == outputs and not duals[0].sizes
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(JournalError, match="differs in stop_token_ids"):
        sample_all(3, 1, stop_token_ids=[7])
    assert (tmp_path / "out").read_bytes() == before


def test_stop_tokens_outside_the_vocabulary(sample_all):
    with pytest.raises(ValueError, match=r"stop_token_ids: \[300\] are outside"):
        sample_all(1, 1, stop_token_ids=[299, VOCABULARY])


def test_broken_generation_config_is_told_on_connecting(folder, monkeypatch):
    models = [MODELS[0], Model("b", folder("b", "{"), 100)]
    monkeypatch.setitem(globals(), "MODELS", models)

    async def connect(**settings):
        config = CoordinatorConfig(url_a="http://a", url_b="http://b", **settings)
        async with Prepared(config):
            pass

    with pytest.raises(ClientError, match="generation_config.json of .*b'"):
        asyncio.run(connect())
    asyncio.run(connect(ignore_eos=True))


@pytest.fixture
def http():
    with FailingServer() as server:
        yield server


def connect(http: FailingServer, **options) -> Model:
    async def run() -> Model:
        server = Server(http.url, **options)
        try:
            return await server.connect()
        finally:
            await server.close()

    return asyncio.run(run())


CARDS = b'{"data": [{"id": "a", "root": "/a", "max_model_len": 9}, {"id": "b"}]}'


def test_the_first_model_is_taken(http):
    http.replies = [Reply(CARDS)] * 2
    assert connect(http) == Model("a", "/a", 9)


def test_the_key_is_sent_and_kept_nowhere(sample_all, tmp_path, http):
    connect(http, api_key="sesame")
    assert http.keys == {"Bearer sesame"}
    outputs, _ = sample_all(1, 1, api_key="sesame")
    assert sample_all(1, 1, api_key="another")[0] == outputs
    assert b"sesame" not in (tmp_path / "out").read_bytes()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"data": []}', "serves no model"),
        (b'{"data": [{"id": "a"}]}', "no vLLM server"),
    ],
)
def test_no_model(http, body, message):
    http.replies = [Reply(body)] * 2
    with pytest.raises(ClientError, match=message):
        connect(http)


@pytest.mark.parametrize("url", ["http://host:abc", "localhost", "ftp://host", ""])
def test_no_address(url):
    with pytest.raises(ClientError, match="is no address"):
        DualVLLMCoordinator(CoordinatorConfig(url_a="http://a", url_b=url))


def test_recorded_answers_are_given_again(http):
    async def use(server: Server, text: str) -> list[int]:
        try:
            await server.connect()
            return await server.tokenize(text)
        finally:
            await server.close()

    server = Server(http.url)
    answers = record(server)
    tokens = asyncio.run(use(server, "text"))
    assert len(answers) == 2 and tokens == http.tokenize("text")
    with replay([{}, answers]) as (empty, full):
        assert asyncio.run(use(Server(full), "text")) == tokens
        for url, text in ((full, "other"), (empty, "text")):
            with pytest.raises(ClientError, match="not recorded"):
                asyncio.run(use(Server(url), text))


def test_each_server_has_its_own_cores(monkeypatch, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if len(cores) > 1:
        shares = share_cores(2)
        assert sorted(shares[0] + shares[1]) == cores
        assert abs(len(shares[0]) - len(shares[1])) <= 1
    assert share_cores(len(cores) + 1) == [[]] * (len(cores) + 1)
    server = LocalServer("nowhere", tmp_path / "log", cores=cores[-1:])
    server.start()
    try:
        assert os.sched_getaffinity(server.process.pid) == {cores[-1]}
    finally:
        server.kill()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert share_cores(2) == [[], []]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_first_layers(model_folder, tmp_path, family):
    """At the same place the next time, so that a run can go on."""
    folder = tmp_path / "part"
    for layers in (1, 1):
        assert first_layers(model_folder(family), layers, folder) == folder
        config = json.loads((folder / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize(("family", "name"), [("opt", "OPT"), ("llama", "Llama")])
def test_no_first_layers(model_folder, tmp_path, family, name):
    """They are elsewhere, or there are no more."""
    with pytest.raises(LaunchError, match=f"--model-b: .*{name}"):
        first_layers(
            model_folder(family), 1 if name == "OPT" else 20, tmp_path / "part"
        )


def test_started_models_keep_their_names(tmp_path, monkeypatch):
    """From one run to the next, wherever it is started."""
    started = []

    @contextmanager
    def servers(models, logs, arguments):
        started.append(models)
        yield [SimpleNamespace(url=f"http://{name}") for name in "ab"]

    monkeypatch.setattr(program, "servers", servers)
    monkeypatch.setattr(program, "WORK", tmp_path / "work")
    for folder, model in ((REFERENCE_MODEL.parent, "model"), (tmp_path, None)):
        monkeypatch.chdir(folder)
        options = ["--model-a", model] if model else []
        monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", *options])
        with program.addresses(program.parse_args()) as urls:
            assert urls == ["http://a", "http://b"]
    assert started[0] == started[1]
    assert started[0][0] == str(REFERENCE_MODEL)
    config = json.loads((Path(started[0][1]) / "config.json").read_text())
    assert config["num_hidden_layers"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinators", "0"], "--coordinators: must be at least 1"),
        (["--samples", "0"], "--samples: must be at least 1"),
        (["--stream", "--out", "somewhere"], "--stream"),
        (["--stream", "--samples", "2"], "--stream"),
        (["--serve-args", "'"], "--serve-args: No closing quotation"),
        (["--prompt", "a", "--prompts", "b"], "--prompts: not allowed with"),
    ],
)
def test_wrong_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", *options])
    with pytest.raises(SystemExit):
        program.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sample", "--prompts", "/nowhere"], "--prompts /nowhere: No such file"),
        (["sample", "--top-k", "300"], "error: Value error, top_k is 300"),
        (["sample", "--out", str(EXAMPLES)], f"--out {EXAMPLES}: is a folder"),
        (["compare", "--sizes", "20", "300"], "--sizes 300: "),
        (["sample", "--model-a", "/nowhere"], "--model-a /nowhere: "),
    ],
)
def test_no_server_is_started_for_wrong_options(options, message, monkeypatch):
    def servers(*_):
        raise AssertionError("a server was started")

    monkeypatch.setattr(program, "servers", servers)
    monkeypatch.setattr(sys, "argv", ["dual_vllm", *options])
    with pytest.raises(SystemExit) as error:
        program.main()
    assert message in str(error.value)


def test_stop_token_ids_as_options(monkeypatch):
    options = ["--stop-token-ids", "5", "9", "--stop-token-ids", "7"]
    monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", *options])
    settings = program.settings(
        program.parse_args(), url_a="http://a", url_b="http://b"
    )
    assert settings.stop_token_ids == [5, 9, 7]


def read_prompts(path: Path) -> list:
    return program.read_prompts(SimpleNamespace(prompts=path, prompt=None))


def test_prompts_of_a_file(tmp_path):
    """With a byte-order mark, blank lines, and what only JSON takes for no line end."""
    rows = [
        {"prompt": "one\u2028line\u0085of\x1ctext"},
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": None, "prompt": "two"},
        {"prompt_token_ids": [7], "prompt": "not this one"},
    ]
    path = tmp_path / "prompts"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[2:2] = ["", " \t"]
    for end in ("\n", "\r\n"):
        path.write_bytes(end.join([*lines, ""]).encode("utf-8-sig"))
        assert read_prompts(path) == [rows[0]["prompt"], [5, 6], "two", [7]]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "5",
        "[]",
        "null",
        "{}",
        '{"prompt": 5}',
        '{"prompt": null}',
        '{"prompt": ["a"]}',
        '{"prompt_token_ids": 5}',
        '{"prompt_token_ids": "56"}',
        '{"prompt_token_ids": [5, "6"]}',
        '{"prompt_token_ids": [5, true]}',
        '{"prompt_token_ids": [5.0], "prompt": "a"}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:30],
)
def test_wrong_prompts(tmp_path, line):
    path = tmp_path / "prompts"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=f"--prompts: line 3 of {path} is no JSON"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (b'{"prompt": "\xff"}', "is no UTF-8")],
)
def test_no_prompts(tmp_path, content, message):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--prompts: {path} {message}"):
        read_prompts(path)


def test_commands_of_the_readme():
    """They are called from where ./build.sh puts them."""
    text = (EXAMPLES / "applications" / "dual_vllm" / "README.md").read_text()
    found = re.findall(r"(\S*)\b(?:python examples|vllm serve \S)", text)
    assert len(found) >= 4
    assert all(place.strip("`").endswith(".venv/bin/") for place in found)
