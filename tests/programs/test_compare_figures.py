# SPDX-License-Identifier: Apache-2.0
"""The statistics of `examples/applications/compare`, without a model."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "applications"))

from compare import figures
from compare.divergence import estimate_tail, terms
from compare.figures import Positions, standard_error, summarize
from compare.page import write_page
from compare.plots import draw
from compare.run import without_nan
from compare.tables import (
    CHOICES,
    DIVERGENCE,
    PERPLEXITY,
    WITHIN_NOISE,
    by_confidence,
    cell,
    show,
)


def positions(count: int, seed: int = 0, loss: float = 0.1) -> Positions:
    rng = np.random.default_rng(seed)
    p = np.log(rng.uniform(0.01, 0.9, count))
    q = p + rng.normal(-loss, loss, count)
    kl = rng.gamma(1.0, loss, count)
    top = np.maximum(p, np.log(rng.uniform(0.05, 1.0, count)))
    return Positions(
        p, q, top, rng.integers(1, 4, count), rng.random(count) < 0.9, kl,
        kl + rng.normal(0, 0.01, count), np.full(count, 1e-4),
        rng.uniform(0, 0.1, count), rng.uniform(0, 0.1, count),
    )  # fmt: skip


def test_of_independent_values_the_error_is_the_usual_one():
    values = np.random.default_rng(0).normal(size=40_000)
    usual = stats.sem(values)
    # 625 blocks: the relative deviation of their spread is 1/sqrt(2 * 625) = 3 %.
    assert standard_error(values) == pytest.approx(usual, rel=0.15)


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_intervals_hold_what_they_say_for_values_that_depend_on_their_neighbours(memory):
    rng = np.random.default_rng(1)
    held, usual, trials = 0, 0, 400
    for _ in range(trials):
        noise = rng.normal(size=6400)
        values = np.empty_like(noise)
        state = rng.normal() / math.sqrt(1 - memory**2)
        for number, shock in enumerate(noise):
            state = memory * state + shock
            values[number] = state
        mean = abs(values.mean())
        held += mean < figures.Z * standard_error(values)
        usual += mean < figures.Z * stats.sem(values)
    # 95 %, less up to 4 % for what reaches beyond blocks of 64; 1 % is one deviation.
    assert 0.88 < held / trials < 0.98
    if memory:
        assert usual / trials < 0.6  # so the usual error is three times too small


def test_few_positions_make_small_blocks():
    assert figures.block_length(10) == 1
    assert figures.block_length(32 * 5) == 5
    assert figures.block_length(10**6) == figures.BLOCK
    assert standard_error(np.arange(20.0)) == pytest.approx(stats.sem(np.arange(20.0)))
    assert math.isnan(standard_error(np.ones(1)))


def test_the_paired_interval_is_that_of_the_difference():
    it = positions(6400)
    report = summarize(it, 10_000)
    difference = it.p_next - it.q_next
    ratio = report["perplexity_ratio"]
    assert ratio["value"] == pytest.approx(math.exp(difference.mean()))
    error = math.log(ratio["high"] / ratio["value"]) / figures.Z
    assert error == pytest.approx(stats.sem(difference), rel=0.3)
    width = math.log(report["perplexity"]["high"] / report["perplexity"]["low"])
    assert math.log(ratio["high"] / ratio["low"]) < width / 4
    bits = -it.q_next.sum() / math.log(2) / 10_000
    assert report["bits_per_byte"] == pytest.approx(bits)


def test_buckets_hold_all_positions_and_their_own_figures():
    it = positions(5000)
    report = summarize(it, 10_000)
    rows = report["by_confidence"]
    assert sum(row["positions"] for row in rows) == 5000
    for name in ("estimate", "lower_bound"):
        mean = sum(row["share"] * row["kl"][name]["mean"] for row in rows)
        assert mean == pytest.approx(report["kl"][name]["mean"])
    flips = sum(row["share"] * row["flips"]["mean"] for row in rows)
    assert flips == pytest.approx(report["flips"]["mean"])


def test_a_bucket_of_one_position_has_no_error():
    report = summarize(positions(1), 4)
    assert report["by_confidence"][0]["positions"] == 1
    assert math.isnan(report["by_confidence"][0]["kl"]["estimate"]["standard_error"])


def test_of_positions_without_a_number_only_the_count_is_left():
    it = positions(40)
    broken = it._replace(q_next=np.where(np.arange(40) < 3, np.nan, it.q_next))
    report = summarize(broken, 100)
    few = summarize(it.where(np.arange(40) >= 3), 100 * 37 / 40)
    assert report.pop("non_finite") == 3 and few.pop("non_finite") == 0
    assert report.pop("positions") == 40 and few.pop("positions") == 37
    same = json.dumps(report), json.dumps(few)  # NaN is no equal of itself
    assert same[0] == same[1]
    nothing = summarize(it._replace(q_next=np.full(40, -np.inf)), 100)
    assert nothing == {"positions": 40, "non_finite": 40}


def test_the_draws_error_is_that_of_the_draws():
    """The estimates of many draws spread as the variance says, around the truth."""
    rng = np.random.default_rng(0)
    size, samples = 500, 8
    p, q = (np.log(rng.dirichlet(np.ones(size))) for _ in range(2))
    drawn = rng.integers(0, size, (20_000, samples))
    estimates, variances = estimate_tail(p[drawn], q[drawn], size)
    truth = terms(p, q).sum()
    assert truth == pytest.approx((np.exp(p) * (p - q)).sum())
    error = estimates.std() / math.sqrt(len(estimates))
    assert abs(estimates.mean() - truth) < 4 * error
    assert variances.mean() == pytest.approx(estimates.var(), rel=0.1)


def test_each_bucket_has_the_figures_of_the_whole():
    report = summarize(positions(5000), 10_000)
    of_text = {"non_finite", "bits_per_byte", "reference_bits_per_byte", "tail_mass"}
    for row in report["by_confidence"]:
        assert {*report} - {*row} == of_text | {"by_confidence"}
        assert {*report["delta_p"]} - {*row["delta_p"]} == {"histogram"}
        assert row["delta_p"]["percentiles"]["min"] < 0


def result(name: str, it: Positions, fewer: float | None = 0.1) -> dict:
    """As of a model that was scored."""
    figures = summarize(it, 10_000) | {"kl_lower_bound_of_fewer_candidates": {1: fewer}}
    return without_nan({
        "model": name, "dtype": "float32", "quantization": "None", "size_on_disk": 3,
        "tokens_per_second": 1.0, "figures": figures,
    })  # fmt: skip


def report_of(models: list[dict], floor: dict | None) -> dict:
    reference = {
        "model": "source", "dtype": "float32", "quantization": "None", "vllm": "0",
        "size_on_disk": 9, "tokens_per_second": 1.0, "non_finite": 0, "bytes": 1,
        "bytes_of_all_logits_in_float16": 2,
    }  # fmt: skip
    plan = {
        "texts": {"text": ["a.txt"], "dataset_split": "test", "text_column": "text"},
        "context_length": 8, "stride": None, "top_k": 4, "tail_samples": 2,
    }  # fmt: skip
    return {
        "plan": plan, "reference": reference, "text": {"positions": 9, "windows": 1},
        "noise_floor": floor, "models": models,
        "failed": [{"model": "bad", "error": "log\nOSError: [/a] is no [model]"}],
        "missing": ["bad", "late"],
    }  # fmt: skip


def broken(it: Positions, many: bool) -> Positions:
    """Some rows, or all, that are not finite."""
    which = np.arange(len(it.kl)) < (len(it.kl) if many else len(it.kl) // 2)
    return it._replace(q_next=np.where(which, np.nan, it.q_next))


@pytest.mark.parametrize("count", [1, 2, 3, 70])
def test_few_positions_and_rows_that_are_not_finite_are_reported(count, tmp_path, capsys):
    """Each figure that is no number is an empty cell, and the rest is there."""
    it = positions(count)
    models = [result("fine", it), result("awful", it._replace(q_next=it.q_next - 2000))]
    models += [result("half", broken(it, False)), result("none", broken(it, True), None)]
    floor = result("noise floor", positions(count, loss=0.01))
    report = report_of(models, floor)
    everything = [floor, *models]
    show(report, everything)
    names = draw(report, everything, tmp_path)
    write_page(report, everything, tmp_path / "report.md", names)
    for text in (capsys.readouterr().out, (tmp_path / "report.md").read_text()):
        assert "bad failed: OSError: [/a] is no [model]" in text
        assert "late is not scored yet" in text
        assert "None" not in text and "nan" not in text.split("KL(")[1]
        first = text.split("correlation")[1].splitlines()
        own = next(line for line in first if "source" in line)
        assert f"{report['models'][0]['figures']['reference_perplexity']['value']:.4f}" in own
    json.dumps(report, allow_nan=False)


def test_buckets_that_the_first_model_lacks_are_shown(tmp_path):
    it = positions(500)
    confident = np.exp(it.p_top) > 0.5
    first = result("first", it._replace(q_next=np.where(confident, np.nan, it.q_next)))
    second = result("second", it)
    headings, rows = by_confidence([first, second], DIVERGENCE[0], None)
    assert len(headings) == len(second["figures"]["by_confidence"])
    assert rows[0][-1] == "" != rows[1][-1]


def test_what_is_within_the_noise_is_marked():
    floor = summarize(positions(3000, loss=0.01), 10_000)
    better = summarize(positions(3000, loss=0.001), 10_000)
    worse = summarize(positions(3000, loss=0.1), 10_000)
    for column in (*PERPLEXITY[:2], PERPLEXITY[3], DIVERGENCE[0], DIVERGENCE[3], CHOICES[4]):
        assert cell(column, better, floor).endswith(WITHIN_NOISE)
        assert not cell(column, worse, floor).endswith(WITHIN_NOISE)
        assert not cell(column, floor, floor).endswith(WITHIN_NOISE)
        assert not cell(column, better, None).endswith(WITHIN_NOISE)
