# SPDX-License-Identifier: Apache-2.0
"""`examples/utio_tradeoff.py` against a plain PyTorch loop."""

import csv
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from depth_routing import NUM_LAYERS
from scipy.special import log_softmax
from tiny_models import CONFIGS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
TEXTS = [ROOT / "tests" / name for name in ("oracle.py", "scoring.py", "conftest.py")]
CUTOFFS = [2, 4]
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
                self.timed_steps = timed_steps(utio_tradeoff, self, llm)
            return super().speedup(llm, max_depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utio_tradeoff, "Sweep", Kept)
        points = utio_tradeoff.main(
            [
                *("--model", str(model_folder("deep_llama")), "--enforce-eager"),
                *("--text", *map(str, TEXTS), "--cutoffs", *map(str, CUTOFFS)),
                *("--prompt-length", f"{PROMPT}", "--forced-length", f"{FORCED}"),
                *("--sequences", f"{SEQUENCES}", "--leaving", "0.3", "0.5"),
                *("--mix", "0.2,0.5"),
                *("--speed-tokens", "4", "--speed-rounds", "2"),
                *("--csv", str(folder / "points.csv")),
                *("--output", str(folder / "plot.png")),
                *("--kv-cache-memory-bytes", str(2**26)),
            ]
        )
    return points, utio_tradeoff, folder, made[0]


def timed_steps(module, sweep, llm, max_tokens=5) -> int:
    """How many of the engine's steps a speed-up is made of."""
    from vllm import SamplingParams

    steps, engine = [], llm.llm_engine
    step = engine.step
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: len(steps))
        patch.setattr(module, "time", clock)
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
    ways = ("random", "tis", "oracle")
    plans = [((c,), (leaving,)) for c in CUTOFFS for leaving in (0.3, 0.5)]
    plans.append((tuple(CUTOFFS), (0.2, 0.5)))
    assert set(points) == {("all tokens", (c,), (1.0,)) for c in CUTOFFS} | {
        (way, *plan) for way in ways for plan in plans
    }
    for p in swept[0]:
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


def test_what_the_oracle_knows(swept, windows, depth_oracle):
    """The divergence at the step's own position, after a history of full depth."""
    oracle, known = depth_oracle("deep_llama"), swept[1].Chosen.divergence
    assert len(known) == len(windows) * len(CUTOFFS)
    for name in (0, 7):
        prompt, tokens = windows[name][:PROMPT], windows[name][PROMPT:]
        for cutoff in CUTOFFS:
            assert len(known[f"{name}", cutoff]) == FORCED - 1
            for step in (0, 5, FORCED - 2):
                p, q = (
                    log_softmax(
                        oracle.logits(
                            prompt, tokens[: step + 2], [NUM_LAYERS] * step + [depth]
                        )[-1]
                    )
                    for depth in (NUM_LAYERS, cutoff)
                )
                kl = np.sum(np.exp(p) * (p - q))
                assert known[f"{name}", cutoff][step] == pytest.approx(kl, rel=1e-3)


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
        wanted = [module.Chosen.divergence[name, cutoff][step] for name in names]
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
    calibration = save_probes(tmp_path, hidden_size, CUTOFFS, translators=True)
    made = []
    monkeypatch.setattr(utio_tradeoff, "show", lambda sweep: made.append(sweep))
    points = utio_tradeoff.main(
        [
            *("--model", str(model_folder("deep_llama")), "--enforce-eager"),
            *("--text", *map(str, TEXTS), "--cutoffs", *map(str, CUTOFFS)),
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
        assert set(by_way) == {"all tokens", "random", "tis", "probe", "oracle"}
        exited = log_softmax(forced(oracle, windows, cutoff), -1)
        wanted = -np.take_along_axis(exited, targets, -1).mean()
        assert math.log(by_way["all tokens"].perplexity) == pytest.approx(
            wanted, rel=1e-4
        )
        # At the first decode step the history is the prompt, for all.
        kl = (np.exp(full) * (full - exited)).sum(-1)[:, 0]
        known = [
            utio_tradeoff.Chosen.divergence[f"{n}", cutoff][0] for n in range(SEQUENCES)
        ]
        np.testing.assert_allclose(known, kl, rtol=1e-3)


def test_share_of_the_gap():
    from utio_tradeoff import Point, closed

    def point(way, perplexity):
        return Point(way, (2,), (0.5,), 0.7, perplexity, 0.0, 0.0, 1.0)

    points = [point("random", 30.0), point("oracle", 20.0), point("probe", 24.0)]
    assert closed(points, points[2]) == pytest.approx(0.6)
    assert closed(points, points[0]) is None
    assert closed(points[1:], points[2]) is None


@pytest.mark.parametrize("size", [50, 800])
def test_interval_of_the_share(size):
    """By the delta method."""
    from utio_tradeoff import Point, interval

    rng = np.random.default_rng(size)
    losses = rng.normal(3, 0.5, size) + np.array([[0.3], [0.1], [0.15]])
    losses += rng.normal(0, 0.1, losses.shape)
    keys = [(way, (2,), (0.5,)) for way in ("random", "oracle", "probe")]
    point = Point("probe", (2,), (0.5,), 0.7, 0.0, 0.0, 0.0, 1.0)
    sweep = SimpleNamespace(losses=dict(zip(keys, losses)))
    random, oracle, own = np.exp(losses.mean(1))
    share = (random - own) / (random - oracle)
    gradient = [(1 - share) * random, share * oracle, -own] / (random - oracle)
    error = np.std(gradient @ losses) / size**0.5
    wanted = share - 1.96 * error, share + 1.96 * error
    assert interval(sweep, point) == pytest.approx(wanted, abs=0.3 * error)


def test_a_gap_within_noise_has_no_share():
    from utio_tradeoff import Point, gap_closed

    rng = np.random.default_rng(0)
    keys = [(way, (2,), (0.5,)) for way in ("random", "oracle", "probe")]
    losses = dict(zip(keys, rng.normal(3, 0.5, (3, 64))))
    points = [
        Point(*key, 0.7, math.exp(own.mean()), 0.0, 0.0, 1.0)
        for key, own in losses.items()
    ]
    points[1].perplexity = points[0].perplexity - 1e-3
    assert gap_closed(SimpleNamespace(losses=losses, points=points), points[2]) == (
        "not resolved"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cutoffs", "0"], "--cutoffs must be at least 1"),
        (["--cutoffs", "6"], "--cutoffs 6: the model has 6 layers"),
        (["--leaving", "1.5"], "--leaving must be between 0 and 1"),
        (["--leaving", "nan"], "--leaving must be between 0 and 1"),
        (["--ways", "probe"], "--ways probe needs a --calibration"),
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

    given = ["--model", str(model_folder("deep_llama")), "--text", str(TEXTS[0])]
    with pytest.raises(SystemExit) as error:
        utio_tradeoff.main([*given, *options])
    assert message in f"{error.value} {capsys.readouterr().err}"
