# SPDX-License-Identifier: Apache-2.0
"""Every figure of `examples/applications/compare` against Transformers in float32, the
whole vocabulary and float64 NumPy, on two models; and what must come out exactly."""

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compare_models import (
    divergence,
    merged,
    reported,
    save_noisy,
    true_figures,
    true_logprobs,
)
from oracle import Oracle
from safetensors.torch import load_file, save_file
from scoring import FLOAT32_TOLERANCE, LOGIT_ERROR, random_ids
from tiny_models import CONFIGS, save_model
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "applications"))

from compare.divergence import TAIL_FLOOR
from compare.figures import CONFIDENCE, Positions, summarize
from compare.windows import Window

FAMILIES = ("llama", "qwen2")  # the second has a tied head
TOP_K, SAMPLES = 16, 8
CONTEXT = 64
TEXTS = 32
LENGTH = TEXTS * CONTEXT
KL_TOLERANCE = 2 * FLOAT32_TOLERANCE + 2 * TAIL_FLOOR
"""Of a divergence, in nats: the mean, under p, of a difference of two float32
log-probabilities; and what the bound's floor on tails may take."""
OPTIONS = dict(
    dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 * 2**20,
    max_model_len=CONTEXT, max_num_batched_tokens=1024, enable_prefix_caching=False,
)  # fmt: skip


class Case(NamedTuple):
    p: np.ndarray  # [N, V] true log-probabilities of the reference
    q: np.ndarray  # [N, V] of the model
    ids: np.ndarray  # [N] the right tokens
    reference: object
    engines: list
    positions: Positions  # of the model
    figures: dict


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Reference and model of a family."""

    @cache
    def make(family: str) -> tuple[Path, Path]:
        source = save_model(family, tmp_path_factory.mktemp(family))
        if family == "llama":  # no ties, so that the top token is certain
            separate_twins(source)
        return source, save_noisy(source, tmp_path_factory.mktemp(f"noisy_{family}"))

    return make


def separate_twins(folder: Path) -> None:
    from tiny_models import TWINS

    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][TWINS[1]] = -weights["lm_head.weight"][TWINS[0]]
    save_file(weights, path, metadata={"format": "pt"})


def drawn_windows(folder: Path) -> list[Window]:
    """Texts that the model draws itself, so that the right token is often probable."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    first = torch.tensor(random_ids(0, 500, TEXTS, 1))
    ids = model.generate(
        first, attention_mask=torch.ones_like(first), do_sample=True, temperature=0.7,
        top_k=0, min_new_tokens=CONTEXT - 1, max_new_tokens=CONTEXT - 1,
    )  # fmt: skip
    return [Window(row, CONTEXT - 1) for row in ids.tolist()]


def positions_of(reference, result) -> Positions:
    return Positions(
        reference.next_logprobs, result.next_logprobs, reference.logprobs[:, 0],
        result.next_ranks, result.same_top, result.kl, result.estimate,
        result.variance, reference.tail_mass, result.tail_mass,
    )  # fmt: skip


@pytest.fixture(scope="module")
def case(runner, folders):
    from compare.reference import compare_with, make_reference
    from vllm import LLM

    @cache
    def make(family: str, top_k: int = TOP_K) -> Case:
        windows = drawn_windows(folders(family)[0])
        ids = np.array([i for w in windows for i in w.token_ids[-w.scored :]])
        true = [true_logprobs(Oracle(folder), windows) for folder in folders(family)]
        size = CONFIGS[family].vocab_size
        options = OPTIONS | {"max_logprobs": size + SAMPLES + 1}
        engines = [LLM(str(folder), **options) for folder in folders(family)]
        reference = make_reference(engines[0], windows, top_k, SAMPLES)
        positions = positions_of(reference, compare_with(engines[1], reference))
        figures = summarize(positions, LENGTH)
        return Case(*true, ids, reference, engines, positions, figures)

    return make


def margin(logprobs: np.ndarray) -> np.ndarray:
    first_two = np.sort(logprobs, axis=1)[:, -2:]
    return first_two[:, 1] - first_two[:, 0]


def undecided_of(it: Case) -> np.ndarray:
    """Where float32 may choose another top token, `[N]` bool."""
    return (margin(it.p) < 2 * LOGIT_ERROR) | (margin(it.q) < 2 * LOGIT_ERROR)


def check_figures(figures: dict, expected: dict, one: float) -> None:
    """All figures, of all positions or of a bucket.

    Args:
        one: by how much a share may be off.
    """
    got = reported(figures)
    ratio, perplexity = expected["perplexity_ratio"], expected["perplexity"]
    allowed = {
        "perplexity": perplexity * FLOAT32_TOLERANCE,
        "reference_perplexity": expected["reference_perplexity"] * FLOAT32_TOLERANCE,
        "perplexity_ratio": 2 * ratio * FLOAT32_TOLERANCE,
        "kl": 4 * figures["kl"]["estimate"]["draw_error"] + KL_TOLERANCE,
        "top_1_agreement": one,
        "flips": one,
        "right_to_wrong": one,
    }
    for name, value in expected.items():
        tolerance = allowed.get(name, 2 * FLOAT32_TOLERANCE)
        assert got[name] == pytest.approx(value, abs=tolerance), name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_figure_is_that_of_the_whole_distributions(case, family):
    it = case(family)
    expected = true_figures(it.p, it.q, it.ids)
    assert 0.02 < expected["kl"] < 0.5 and expected["flips"] > 0
    assert it.figures["kl"]["estimate"]["draw_error"] < 0.2 * expected["kl"]
    check_figures(it.figures, expected, undecided_of(it).mean() + 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_is_the_divergence_of_the_candidates_and_any_other(case, family):
    it = case(family)
    few = [merged(x, it.reference.candidates) for x in (it.p, it.q)]
    bound = divergence(*few)
    np.testing.assert_allclose(it.positions.kl, bound, rtol=0, atol=KL_TOLERANCE)
    assert (it.positions.kl <= divergence(it.p, it.q) + KL_TOLERANCE).all()
    kl = it.figures["kl"]
    found = kl["lower_bound_percentiles"]
    for name, value in found.items():
        if name[0] == "p":
            expected = np.percentile(bound, float(name[1:]))
            assert value == pytest.approx(expected, abs=KL_TOLERANCE)
    assert kl["lower_bound"]["mean"] == pytest.approx(bound.mean(), abs=KL_TOLERANCE)


def test_with_all_candidates_the_divergence_is_exact(case):
    it = case("qwen2", CONFIGS["qwen2"].vocab_size)
    kl = it.figures["kl"]
    expected = divergence(it.p, it.q)
    assert kl["estimate"]["draw_error"] == 0
    assert kl["estimate"]["mean"] == pytest.approx(expected.mean(), abs=KL_TOLERANCE)
    for name in ("p50", "p99"):
        value = np.percentile(expected, float(name[1:]))
        got = kl["lower_bound_percentiles"][name]
        assert got == pytest.approx(value, abs=KL_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_by_confidence(case, family):
    it = case(family)
    confidence = np.exp(it.p.max(axis=1))
    undecided = undecided_of(it)
    rows = it.figures["by_confidence"]
    assert len(rows) > 2 and sum(row["positions"] for row in rows) == len(it.ids)
    for row in rows:
        if row["positions"] < 8:  # too few for a correlation
            continue
        keep = (confidence >= row["from"]) & (confidence < row["to"])
        near = np.abs(confidence[:, None] - CONFIDENCE).min(axis=1) < FLOAT32_TOLERANCE
        assert abs(keep.sum() - row["positions"]) <= near.sum()
        if keep.sum() != row["positions"]:
            continue
        expected = true_figures(it.p[keep], it.q[keep], it.ids[keep])
        one = undecided[keep].mean() + 1e-12
        check_figures(row, expected, one)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_compared_with_itself_loses_exactly_nothing(case, family):
    from compare.reference import compare_with

    it = case(family)
    result = compare_with(it.engines[0], it.reference)
    figures = summarize(positions_of(it.reference, result), LENGTH)
    assert figures["perplexity_ratio"] == {"value": 1, "low": 1, "high": 1}
    assert figures["correlation"] == 1
    nothing = {"mean": 0, "standard_error": 0}
    assert figures["kl"]["estimate"] == nothing | {"draw_error": 0}
    assert figures["kl"]["lower_bound"] == figures["log_perplexity_ratio"] == nothing
    assert set(figures["kl"]["lower_bound_percentiles"].values()) == {0}
    assert figures["top_1_agreement"] == {"mean": 1, "standard_error": 0}
    assert figures["flips"]["mean"] == figures["flips"]["right_to_wrong"] == 0
    assert set(figures["delta_p"]["percentiles"].values()) == {0}
    assert figures["delta_p"]["rms"] == {"value": 0, "standard_error": 0}
    assert set(result.kl_of_fewer.values()) == {0}


def test_other_batches_are_of_the_order_of_rounding(case):
    """The noise floor's half that is due to the batches."""
    from compare.reference import compare_with

    it = case("llama")
    result = compare_with(it.engines[0], it.reference, backwards=True)
    difference = np.abs(result.next_logprobs - it.reference.next_logprobs)
    assert difference.max() <= FLOAT32_TOLERANCE


def test_positions_that_are_not_finite_are_counted_and_left_out(
    case, tmp_path, folders
):
    from compare.reference import compare_with, make_reference
    from vllm import LLM

    it = case("llama")
    source = folders("llama")[1]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    windows = it.reference.windows
    # The token that the fewest windows hold, and the rows that its state reaches.
    used = Counter(i for ids, _ in windows for i in set(ids))
    rare = used.most_common()[-1][0]
    broken = np.array(
        [rare in ids[:end] for ids, n in windows for end in range(len(ids) - n, len(ids))]
    )
    weights["model.embed_tokens.weight"][rare] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    size = CONFIGS["llama"].vocab_size
    llm = LLM(str(tmp_path), **OPTIONS, max_logprobs=size)
    positions = positions_of(it.reference, compare_with(llm, it.reference))
    figures = summarize(positions, LENGTH)
    # They may be more: vLLM's attention on a CPU multiplies what a block of the KV cache
    # held before by 0, which leaves a NaN a NaN.
    keep = positions.finite()
    assert broken.any() and not (keep & broken).any()
    assert keep.mean() > 0.9 and figures["non_finite"] == (~keep).sum()
    expected = true_figures(it.p[keep], it.q[keep], it.ids[keep])
    got = reported(figures)
    for name in ("perplexity", "perplexity_ratio"):
        assert got[name] == pytest.approx(expected[name], rel=2 * FLOAT32_TOLERANCE)
    assert got["kl"] == pytest.approx(
        expected["kl"], abs=4 * figures["kl"]["estimate"]["draw_error"] + KL_TOLERANCE
    )

    # The same of a reference that has such rows.
    reference = make_reference(llm, windows, TOP_K, SAMPLES)
    positions = positions_of(reference, compare_with(it.engines[1], reference))
    keep = positions.finite()
    assert not (keep & broken).any() and keep.mean() > 0.9
    got = reported(summarize(positions, LENGTH))
    expected = true_figures(it.q[keep], it.q[keep], it.ids[keep])
    for name in ("perplexity", "reference_perplexity", "perplexity_ratio"):
        assert got[name] == pytest.approx(expected[name], rel=2 * FLOAT32_TOLERANCE)
    assert got["kl"] < KL_TOLERANCE
