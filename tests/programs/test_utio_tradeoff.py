# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/utio/utio_tradeoff.py` against a plain PyTorch loop."""

import csv
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from depth_routing import NUM_LAYERS
from safetensors.torch import load_file
from scipy.special import log_softmax
from tiny_models import CONFIGS, SHORT_TEXTS
from torch.nn.functional import gelu

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "applications" / "utio"))
CUTOFFS = [2, 4]
ORACLES = ("oracle", "oracle-perplexity", "oracle-agreement")
PROMPT, FORCED, SEQUENCES = 9, 13, 10


@pytest.fixture(scope="module")
def swept(model_folder, tmp_path_factory):
    """A run of the program: its points, its module, its folder."""
    import utio_tradeoff

    folder = tmp_path_factory.mktemp("tradeoff")
    made = []

    class Kept(utio_tradeoff.Sweep):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

        def speedup(self, llm, max_depth):
            if not hasattr(self, "timed_steps"):
                self.timed_steps = timed_steps(self, llm)
            return super().speedup(llm, max_depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utio_tradeoff, "Sweep", Kept)
        points = utio_tradeoff.main(
            [
                *("--model", str(model_folder("deep_llama")), "--enforce-eager"),
                *("--text", *map(str, SHORT_TEXTS), "--cutoffs", *map(str, CUTOFFS)),
                *("--prompt-length", f"{PROMPT}", "--forced-length", f"{FORCED}"),
                *("--sequences", f"{SEQUENCES}", "--leaving", "0.3", "0.5"),
                *("--mix", "0.2,0.5", "--drafting", "2,3"),
                *("--speed-tokens", "4", "--speed-rounds", "2"),
                *("--csv", str(folder / "points.csv")),
                *("--output", str(folder / "plot.png")),
                *("--kv-cache-memory-bytes", str(2**26)),
            ]
        )
    return points, utio_tradeoff, folder, made[0]


def timed_steps(sweep, llm, max_tokens=5) -> int:
    """How many of the engine's steps a speed-up is made of."""
    from common import decoding
    from vllm import SamplingParams

    steps, engine = [], llm.llm_engine
    step = engine.step
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: len(steps))
        patch.setattr(decoding, "time", clock)
        patch.setattr(engine, "step", lambda: steps.append(1) or step())
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sweep.generate(llm, [params] * len(sweep.windows))
    return sweep.decoding


@pytest.fixture(scope="module")
def windows(swept) -> list[list[int]]:
    return swept[3].windows.tolist()


def of(swept, way: str, cutoff: int, leaving: float):
    (point,) = [
        p
        for p in swept[0]
        if (p.way, p.exits, p.leaving) == (way, (cutoff,), (leaving,))
    ]
    return point


def forced(oracle, windows, depth: int) -> np.ndarray:
    """Logits `[sequences, decode steps, vocabulary]` with all decode tokens so deep."""
    depths = [depth] * (FORCED - 1)
    return np.stack(
        [oracle.logits(w[:PROMPT], w[PROMPT:], depths)[1:] for w in windows]
    )


def test_every_way_is_there(swept):
    points = [(p.way, p.exits, p.leaving) for p in swept[0]]
    assert len(set(points)) == len(points)
    ways = ("random", "tis", "entropy", *ORACLES)
    plans = [((c,), (leaving,)) for c in CUTOFFS for leaving in (0.3, 0.5)]
    plans.append((tuple(CUTOFFS), (0.2, 0.5)))
    assert set(points) == {("all tokens", (c,), (1.0,)) for c in CUTOFFS} | {
        ("drafting", (2,), (3,))
    } | {(way, *plan) for way in ways for plan in plans}
    for p in swept[0]:
        if p.way == "drafting":
            continue
        staying = 1 - sum(p.leaving)
        wanted = np.dot(p.exits, p.leaving) + staying * NUM_LAYERS
        assert p.mean_depth * NUM_LAYERS == pytest.approx(wanted, abs=0.01)
        assert p.speedup > 0


def test_only_decode_steps_are_timed(swept):
    assert swept[3].timed_steps == 4


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_what_all_tokens_cost(swept, windows, depth_oracle, cutoff):
    oracle = depth_oracle("deep_llama")
    full, exited = (forced(oracle, windows, d) for d in (NUM_LAYERS, cutoff))
    targets = np.array(windows)[:, PROMPT + 1 :, None]

    def perplexity(logits) -> float:
        return math.exp(
            -np.take_along_axis(log_softmax(logits, -1), targets, -1).mean()
        )

    point = of(swept, "all tokens", cutoff, 1.0)
    assert point.perplexity == pytest.approx(perplexity(exited), rel=1e-4)
    wanted = perplexity(exited) / perplexity(full) - 1
    assert point.rise == pytest.approx(wanted, abs=1e-4)
    agreement = (full.argmax(-1) == exited.argmax(-1)).mean()
    assert point.agreement == pytest.approx(agreement, abs=1.5 / exited[..., 0].size)


def test_what_the_oracles_know(swept, windows, depth_oracle):
    """Of the step's own position, after a history of full depth."""
    oracle, known = depth_oracle("deep_llama"), swept[1].Chosen.known
    assert {*known} == {*ORACLES}
    assert all(len(costs) == len(windows) * len(CUTOFFS) for costs in known.values())
    for name in (0, 7):
        prompt, tokens = windows[name][:PROMPT], windows[name][PROMPT:]
        for cutoff in CUTOFFS:
            found = [known[one][f"{name}", cutoff] for one in ORACLES]
            assert {len(one) for one in found} == {FORCED - 1}
            for step in (0, 5, FORCED - 2):
                p, q = (
                    log_softmax(
                        oracle.logits(
                            prompt, tokens[: step + 2], [NUM_LAYERS] * step + [depth]
                        )[-1]
                    )
                    for depth in (NUM_LAYERS, cutoff)
                )
                following = tokens[step + 1]
                wanted = (
                    np.sum(np.exp(p) * (p - q)),
                    p[following] - q[following],
                    float(p.argmax() != q.argmax()),
                )
                for one, value in zip(found, wanted):
                    assert one[step] == pytest.approx(value, rel=1e-3, abs=1e-5)


def test_the_entropy_of_exits(swept, windows, depth_oracle, monkeypatch):
    """At the first decode step the history is the prompt, for all."""
    sweep, module = swept[3], swept[1]
    policy, plan, seen = module.AtTheCutoff.newest, ((2, 4), (0.2, 0.5)), {}

    def score(cutoff, states, req_indices, req_ids):
        names = [int(req_ids[i].rpartition("-")[0]) for i in req_indices.tolist()]
        scores = type(policy).score(policy, cutoff, states, req_indices, req_ids)
        seen.setdefault(cutoff, dict(zip(names, scores.tolist())))
        return scores

    monkeypatch.setattr(policy, "score", score)
    module.Chosen.set("entropy", sweep.shares(*plan))
    policy.config.bucket_shares = module.Chosen.shares
    sweep.force(sweep.engines[-1])
    assert [len(seen[cutoff]) for cutoff in CUTOFFS] == [SEQUENCES, 8]
    for cutoff in CUTOFFS:
        exited = log_softmax(forced(depth_oracle("deep_llama"), windows, cutoff)[:, 0], -1)
        wanted = -(np.exp(exited) * exited).sum(-1)
        for name, entropy in seen[cutoff].items():
            assert entropy == pytest.approx(wanted[name], abs=1e-3)


def test_drafting_loses_nothing(swept):
    (point,) = [p for p in swept[0] if p.way == "drafting"]
    assert point.agreement == 1.0
    assert point.rise == 0.0
    assert point.speedup > 0


def test_random_is_the_mean_of_draws(swept):
    sweep, module = swept[3], swept[1]
    plan, llm = ((4,), (0.5,)), sweep.engines[0]
    losses = []
    for seed in range(3):
        module.Chosen.set("random", sweep.shares(*plan), seed)
        losses.append(-sweep.force(llm).logprobs.mean(1))
    assert not np.array_equal(losses[0], losses[1])
    found = sweep.result.costs["perplexity"]["random", *plan]
    np.testing.assert_allclose(found, np.mean(losses, axis=0), atol=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        ((2,), (0.5,)),
        ((4,), (0.3,)),
        ((2, 4), (0.2, 0.5)),
        ((2, 4), (0.01, 0.5)),  # of ten, none leaves at the first
    ],
)
def test_the_oracle_is_asked_about_the_step_that_runs(swept, monkeypatch, plan):
    """Once a step at the first exit, and for those that stayed at the others."""
    sweep, module = swept[3], swept[1]
    policy, seen = module.AtTheCutoff.newest, {cutoff: [] for cutoff in plan[0]}

    def score(cutoff, states, req_indices, req_ids):
        names = [req_ids[i].rpartition("-")[0] for i in req_indices.tolist()]
        step = len(seen[cutoff])
        scores = type(policy).score(policy, cutoff, states, req_indices, req_ids)
        wanted = [module.Chosen.known["oracle"][name, cutoff][step] for name in names]
        np.testing.assert_allclose(scores, wanted, rtol=1e-6)
        seen[cutoff].append(sorted(map(int, names)))
        return scores

    monkeypatch.setattr(policy, "score", score)
    module.Chosen.set("oracle", sweep.shares(*plan))
    policy.config.bucket_shares = module.Chosen.shares
    sweep.force(sweep.engines[-1])
    first, *others = [c for c, s in zip(*plan) if round(s * SEQUENCES)]
    assert seen[first] == [list(range(SEQUENCES))] * (FORCED - 1)
    for cutoff in others:
        staying = round(SEQUENCES * (1 - plan[1][0]))
        assert [len(names) for names in seen[cutoff]] == [staying] * (FORCED - 1)


def test_files(swept):
    points, _, folder, _ = swept
    rows = list(csv.DictReader((folder / "points.csv").open()))
    assert [row["way"] for row in rows] == [p.way for p in points]
    assert float(rows[0]["perplexity"]) == points[0].perplexity
    assert ("2+4", "0.2+0.5") in {(row["exits"], row["leaving"]) for row in rows}
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_with_a_calibration(model_folder, depth_oracle, tmp_path, monkeypatch):
    """Exits are translated in all ways, and for the oracle's costs too."""
    import utio_tradeoff
    from depth_cutoffs import save_probes

    hidden_size = CONFIGS["deep_llama"].hidden_size
    calibration = save_probes(
        tmp_path, hidden_size, CUTOFFS, translators=True, acceptance=True
    )
    made, start = [], utio_tradeoff.Sweep.run
    monkeypatch.setattr(
        utio_tradeoff.Sweep, "run", lambda self: made.append(self) or start(self)
    )
    points = utio_tradeoff.main(
        [
            *("--model", str(model_folder("deep_llama")), "--enforce-eager"),
            *("--text", *map(str, SHORT_TEXTS), "--cutoffs", *map(str, CUTOFFS)),
            *("--prompt-length", f"{PROMPT}", "--forced-length", f"{FORCED}"),
            *("--sequences", f"{SEQUENCES}", "--leaving", "0.5"),
            *("--speed-rounds", "0", "--calibration", calibration),
            *("--kv-cache-memory-bytes", str(2**26)),
        ]
    )
    (sweep,) = made
    windows = sweep.windows.tolist()
    oracle = depth_oracle("deep_llama", calibration=calibration)
    full = log_softmax(forced(oracle, windows, NUM_LAYERS), -1)
    targets = np.array(windows)[:, PROMPT + 1 :, None]
    for cutoff in CUTOFFS:
        by_way = {p.way: p for p in points if p.exits == (cutoff,)}
        calibrated = {"probe", "agreement"}
        others = {"all tokens", "random", "tis", "entropy", *ORACLES}
        assert set(by_way) == others | calibrated
        exited = log_softmax(forced(oracle, windows, cutoff), -1)
        wanted = -np.take_along_axis(exited, targets, -1).mean()
        assert math.log(by_way["all tokens"].perplexity) == pytest.approx(
            wanted, rel=1e-4
        )
        # At the first decode step the history is the prompt, for all.
        kl = (np.exp(full) * (full - exited)).sum(-1)[:, 0]
        known = [
            utio_tradeoff.Chosen.known["oracle"][f"{n}", cutoff][0]
            for n in range(SEQUENCES)
        ]
        np.testing.assert_allclose(known, kl, rtol=1e-3)
    check_agreement(utio_tradeoff.AtTheCutoff.newest, calibration, hidden_size)


def check_agreement(policy, calibration: str, hidden_size: int) -> None:
    """It scores by the probe of greedy requests: likely agreement costs least."""
    from utio_ways import Chosen

    states = torch.randn(5, hidden_size, generator=torch.Generator().manual_seed(3))
    x = states / (states.square().mean(1, keepdim=True) + 1e-6).sqrt()
    tensors = load_file(calibration)
    weight_1, bias_1, weight_2, bias_2 = (
        tensors[f"acceptance_greedy_{name}"][1]
        for name in ("weight_1", "bias_1", "weight_2", "bias_2")
    )
    wanted = -(gelu(x @ weight_1.T + bias_1) @ weight_2 + bias_2)
    Chosen.set("agreement", [])
    found = policy.score(CUTOFFS[1], states, torch.arange(5), [f"{n}-" for n in range(5)])
    torch.testing.assert_close(found, wanted)


def make_result(ways: dict, files=None, measure: str = "perplexity"):
    """Costs of one plan, a row of sequences a way."""
    from utio_frontier import Result

    size = len(next(iter(ways.values())))
    result = Result(12, np.arange(size) if files is None else files)
    for way, costs in ways.items():
        result.costs[measure][way, (2,), (0.5,)] = np.array(costs)
    return result


def make_point(way: str, rise: float = 0.0, speedup: float = 1.0, depth: float = 0.7):
    from utio_frontier import Point

    return Point(way, (2,), (0.5,), depth, 0.0, rise, 1.0, speedup)


def test_share_of_the_gap():
    from utio_frontier import closed

    ways = {"random": 30.0, "oracle-perplexity": 20.0, "probe": 24.0, "oracle": 22.0}
    result = make_result({way: [math.log(value)] for way, value in ways.items()})
    assert closed(result, make_point("probe"), "perplexity")[0] == pytest.approx(0.6)
    assert closed(result, make_point("oracle"), "perplexity")[0] == pytest.approx(0.8)
    for way in ("random", "oracle-perplexity", "all tokens"):
        assert closed(result, make_point(way), "perplexity") is None
    ways = {"random": [0.4], "oracle-agreement": [0.2], "probe": [0.25]}
    result = make_result(ways, measure="disagreement")
    assert closed(result, make_point("probe"), "disagreement")[0] == pytest.approx(0.75)
    assert closed(result, make_point("probe"), "perplexity") is None


@pytest.mark.parametrize("each", [1, 4])
def test_interval_of_the_share(each):
    """By the delta method, of files of `each` sequences that are alike."""
    from utio_frontier import closed

    size = 400
    rng = np.random.default_rng(size)
    losses = rng.normal(3, 0.5, size) + np.array([[0.3], [0.1], [0.15]])
    losses += rng.normal(0, 0.1, losses.shape)
    ways = ("random", "oracle-perplexity", "probe")
    repeated = np.repeat(losses, each, axis=1)
    files = np.repeat(np.arange(size), each)
    result = make_result(dict(zip(ways, repeated)), files)
    random, oracle, own = np.exp(losses.mean(1))
    share = (random - own) / (random - oracle)
    gradient = [(1 - share) * random, share * oracle, -own] / (random - oracle)
    error = np.std(gradient @ losses) / size**0.5
    wanted = share - 1.96 * error, share + 1.96 * error
    _, interval = closed(result, make_point("probe"), "perplexity")
    assert interval == pytest.approx(wanted, abs=0.3 * error)


def test_a_gap_within_noise_has_no_interval():
    from utio_frontier import gap_closed

    rng = np.random.default_rng(0)
    ways = {way: rng.normal(3, 0.5, 64) for way in ("random", "oracle-perplexity", "probe")}
    ways["random"] += ways["oracle-perplexity"].mean() - ways["random"].mean() + 1e-3
    result = make_result(ways)
    assert gap_closed(result, make_point("probe"), "perplexity") == "not resolved"
    few = {way: np.full(64, x) for way, x in zip(ways, (3.0, 2.0, 2.5))}
    for count, said in ((7, "not resolved"), (8, "62% (62% to 62%)")):
        result = make_result(few, np.arange(64) % count)
        assert gap_closed(result, make_point("probe"), "perplexity") == said


def test_what_is_dominated():
    from utio_frontier import Result, dominated_by, full_depth

    slow, fast = make_point("probe", 0.02, 1.2), make_point("all tokens", 0.01, 1.4)
    faster = make_point("tis", 0.05, 1.5)
    oracle = make_point("oracle", 0.0, 2.0)
    points = [slow, fast, faster, oracle]
    assert dominated_by(points, slow) is fast
    assert [dominated_by(points, p) for p in points[1:]] == [None] * 3
    # Equal ones do not dominate each other.
    assert dominated_by([fast, make_point("random", 0.01, 1.4)], fast) is None
    # Without speeds the layers count.
    deep, shallow = (make_point("probe", 0.01, math.nan, depth) for depth in (0.8, 0.6))
    assert dominated_by([deep, shallow], deep) is shallow
    for points, speedup in (([deep], math.nan), ([slow], 1.0)):
        result = Result(12, np.arange(8), 20.0, points)
        full = full_depth(result)
        assert full.speedup == pytest.approx(speedup, nan_ok=True)
        assert dominated_by([full, *points], points[0]) is None


@pytest.mark.parametrize(("sequences", "counts"), [(3, [1, 1, 1]), (10, [2, 4, 4])])
def test_windows_are_of_all_texts(model_folder, tmp_path, sequences, counts):
    """The shortest text has two, the others as many as are wanted."""
    import utio_options
    import utio_tradeoff

    words = "def main(argument): return argument + 1\n"
    for name, count in (("a", 8), ("b", 100), ("c", 100)):
        (tmp_path / f"{name}.txt").write_text(words * count)
    tokenizer = utio_tradeoff.calibrate.load_tokenizer(str(model_folder("deep_llama")))
    per_text = len(tokenizer.encode(words * 8, add_special_tokens=False))
    length = per_text // 2 + len(tokenizer.encode(""))
    args = utio_options.parse_tradeoff(
        [
            *("--model", str(model_folder("deep_llama")), "--sequences", f"{sequences}"),
            *("--text", str(tmp_path), "--prompt-length", "5"),
            *("--forced-length", f"{length - 5}"),
        ]
    )
    windows, files = utio_tradeoff.read_windows(args)
    assert windows.shape == (sequences, length)
    assert sorted(np.bincount(files).tolist()) == counts
    rows = [(file, *window) for file, window in zip(files, windows.tolist())]
    assert len(set(files)) == 3
    for file, *window in rows[:3]:  # the first of each is its beginning
        text = (tmp_path / f"{'abc'[file]}.txt").read_text()
        assert window == tokenizer(text)["input_ids"][:length]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cutoffs", "0"], "--cutoffs must be at least 1"),
        (["--cutoffs", "6"], "--cutoffs 6: the model has 6 layers"),
        (["--leaving", "1.5"], "--leaving must be between 0 and 1"),
        (["--leaving", "nan"], "--leaving must be between 0 and 1"),
        (["--ways", "probe"], "--ways probe needs a --calibration"),
        (["--ways", "agreement"], "--ways agreement needs a --calibration"),
        (["--random-draws", "0"], "--random-draws must be at least 1"),
        (["--drafting", "6,2"], "--drafting 6: the model has 6 layers"),
        (["--drafting", "0,2"], "--drafting"),
        (["--drafting", "2"], "--drafting"),
        (["--drafting", "2,2", "--speed-rounds", "0"], "--speed-rounds is 0"),
        (["--mix", "0.5"], "--mix"),
        (["--cutoffs", "4", "2", "--mix", "0.1,0.3"], "--cutoffs must be ascending"),
        (["--speed-tokens", "1"], "--speed-tokens must be at least 2"),
        (["--kv-cache-memory-bytes", str(2**21), "--sequences", "6"], "decode at once"),
        (["--cutoffs", "2", "4", "--mix", "0.5"], "--mix"),
        (["--cutoffs", "2", "4", "--mix", "0.5,0.6"], "--mix"),
        (["--cutoffs", "2", "4", "--mix", "0.5,0"], "--mix"),
        (["--cutoffs", "2", "4", "--mix", "0.5,nan"], "--mix"),
        (["--cutoffs", "2", "4", "--mix", "a,b"], "--mix"),
        (["--forced-length", "1"], "--forced-length must be at least 2"),
        (["--prompt-length", "5000"], "--prompt-length, --forced-length and"),
        (["--sequences", "0"], "--sequences must be at least 1"),
        (["--sequences", "100000"], "--sequences 100000: the text has"),
        (["--text", "/nowhere"], "/nowhere"),
        (["--output", "/nowhere/plot.png"], "/nowhere/plot.png"),
        (["--output", "plot.foo"], "--output plot.foo"),
        (["--csv", "/nowhere/points.csv"], "--csv /nowhere/points.csv"),
        (["--speed-rounds", "-1"], "--speed-rounds must be at least 0"),
        (["--calibration", "/nowhere", "--sequences", "6"], "utio_calibration '/nowhere'"),
        (["--dtype", "int3", "--sequences", "6"], "--dtype"),
        (["--model", "/nowhere"], "--model /nowhere"),
    ],
)
def test_errors_name_the_option(model_folder, capsys, options, message):
    import utio_tradeoff

    given = ["--model", str(model_folder("deep_llama")), "--text", str(SHORT_TEXTS[0])]
    with pytest.raises(SystemExit) as error:
        utio_tradeoff.main([*given, "--enforce-eager", *options])
    assert message in f"{error.value} {capsys.readouterr().err}"
