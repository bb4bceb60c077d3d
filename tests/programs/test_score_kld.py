# SPDX-License-Identifier: Apache-2.0
"""`score_kld.py` against the whole distributions of Hugging Face float32."""

import json
import math
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle, log_softmax
from scoring import FLOAT32_TOLERANCE, LOGIT_ERROR
from tiny_models import CONFIGS, make_tokenizer, save_model
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
APPLICATIONS = EXAMPLES / "applications"
sys.path[:0] = [str(folder) for folder in (EXAMPLES, APPLICATIONS, APPLICATIONS / "kld")]

VOCABULARY = CONFIGS["llama"].vocab_size
TOP_KS = (1, 8, 64, VOCABULARY)
SAMPLES = 8
CONTEXT, STRIDE = 48, 24
TEXT = Path(__file__).read_text()[:500]
NOISE = 0.02
"""Relative to the weights; the divergence is then about a tenth of a nat."""
TOLERANCE = 2 * FLOAT32_TOLERANCE
"""Of a divergence, in nats: the mean, under p, of a difference of two float32
log-probabilities."""
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 * 2**20,
}
FLAGS = ["--dtype", "float32", "--enforce-eager"]
FLAGS += ["--kv-cache-memory-bytes", str(OPTIONS["kv_cache_memory_bytes"])]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Folders of these tests' own: of the others', vLLM may keep a tokenizer with a token
    more, which prompt embeddings add."""
    return cache(lambda family: save_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def noisy_folder(model_folder, tmp_path_factory) -> Path:
    """The tiny Llama with noise on its weights."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * parameter.std()
            parameter.add_(noise, alpha=NOISE)
    folder = tmp_path_factory.mktemp("noisy")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def windows() -> list:
    from compare.windows import cut

    return cut(make_tokenizer()(TEXT)["input_ids"], CONTEXT, STRIDE)


@pytest.fixture(scope="module")
def truth(windows, model_folder, noisy_folder) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [N, vocabulary] of both models at the scored positions."""

    def logprobs(folder: Path) -> np.ndarray:
        oracle = Oracle(folder)
        rows = [oracle.logits(ids)[-scored - 1 : -1] for ids, scored in windows]
        return log_softmax(np.concatenate(rows))

    return logprobs(model_folder("llama")), logprobs(noisy_folder)


@pytest.fixture(scope="module")
def engines(runner, model_folder, noisy_folder):
    from vllm import LLM

    options = OPTIONS | {"max_model_len": CONTEXT, "max_logprobs": VOCABULARY + 1}
    options["enable_prefix_caching"] = False
    return [
        LLM(str(folder), **options) for folder in (model_folder("llama"), noisy_folder)
    ]


@pytest.fixture(scope="module")
def references(engines, windows) -> dict:
    from compare.reference import make_reference

    return {k: make_reference(engines[0], windows, k, SAMPLES) for k in TOP_KS}


@pytest.fixture(scope="module")
def results(engines, references) -> dict:
    from compare.reference import compare_with

    return {k: compare_with(engines[1], ref) for k, ref in references.items()}


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL divergence of distributions given by log-probabilities `[N, V]`."""
    return (np.exp(p) * (p - q)).sum(axis=1)


def tails(logprobs: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Log-probabilities `[N, V]` with -inf at the candidates."""
    rest = logprobs.copy()
    np.put_along_axis(rest, candidates.astype(np.int64), -np.inf, axis=1)
    return rest


@pytest.mark.parametrize("top_k", TOP_KS)
def test_the_candidates_are_the_most_probable(references, truth, top_k):
    candidates = references[top_k].candidates
    assert all(len(set(row)) == top_k for row in candidates.tolist())
    lowest = np.take_along_axis(truth[0], candidates, axis=1).min(axis=1)
    wanted = np.sort(truth[0], axis=1)[:, -top_k]
    assert (lowest >= wanted - 2 * LOGIT_ERROR).all()
    assert (np.diff(references[top_k].logprobs, axis=1) <= 0).all()


@pytest.mark.parametrize("top_k", TOP_KS[:-1])
def test_what_the_bound_lacks_is_the_divergence_within_the_tail(
    references, results, truth, top_k
):
    """The formula of the module's docstring, all positions; so it is a bound."""
    p, q = (tails(x, references[top_k].candidates) for x in truth)
    p_mass, q_mass = (np.exp(x).sum(axis=1, keepdims=True) for x in (p, q))
    inside = np.where(
        np.isneginf(p), 0, np.exp(p) * ((p - np.log(p_mass)) - (q - np.log(q_mass)))
    )
    lack = inside.sum(axis=1)
    assert (lack > 0).all()
    np.testing.assert_allclose(
        results[top_k].kl, divergence(*truth) - lack, rtol=0, atol=TOLERANCE
    )
    np.testing.assert_allclose(
        references[top_k].tail_mass, p_mass[:, 0], rtol=0, atol=FLOAT32_TOLERANCE
    )


def test_the_bound_grows_to_the_divergence(results, truth):
    expected = divergence(*truth)
    assert 0.03 < expected.mean() < 0.3
    lower = [results[k].kl for k in TOP_KS]
    for fewer, more in pairwise(lower):
        assert (fewer <= more + TOLERANCE).all()
        assert fewer.mean() < more.mean()
    np.testing.assert_allclose(lower[-1], expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        results[VOCABULARY].estimate, expected, rtol=0, atol=TOLERANCE
    )


def test_fewer_candidates_of_one_file_are_a_file_of_fewer(results):
    assert list(results[VOCABULARY].kl_of_fewer) == [1, 4, 16, 64, 256, VOCABULARY]
    for few in (1, 64):
        assert results[VOCABULARY].kl_of_fewer[few] == pytest.approx(
            results[few].kl.mean(), abs=TOLERANCE
        )


@pytest.mark.parametrize("top_k", TOP_KS[:-1])
def test_the_estimate_is_as_far_off_as_its_sampling_makes_it(
    references, results, truth, top_k
):
    """Within four standard errors, which the oracle's distributions give."""
    p, q = truth
    terms = np.exp(p) * (p - q) - np.exp(p) + np.exp(q)
    outside = np.isfinite(tails(p, references[top_k].candidates))
    variance = np.array([t[keep].var() for t, keep in zip(terms, outside)])
    variance *= (VOCABULARY - top_k) ** 2 / SAMPLES
    error = math.sqrt(variance.sum()) / len(variance)
    mean = divergence(p, q).mean()
    assert error < 0.2 * mean
    assert abs(results[top_k].estimate.mean() - mean) < 4 * error


@pytest.mark.parametrize("top_k", TOP_KS)
def test_perplexities_and_top_tokens(references, results, truth, windows, top_k):
    ids = np.array([i for w in windows for i in w.token_ids[-w.scored :]])
    for logprobs, expected in zip(
        (references[top_k].next_logprobs, results[top_k].next_logprobs), truth
    ):
        own = expected[np.arange(len(ids)), ids]
        np.testing.assert_allclose(logprobs, own, rtol=0, atol=FLOAT32_TOLERANCE)
    # Two of its tokens always tie, and which of them comes first is open.
    first_two = [np.sort(logprobs, axis=1)[:, -2:] for logprobs in truth]
    decided = np.min([np.diff(x)[:, 0] for x in first_two], axis=0) > 2 * LOGIT_ERROR
    assert decided.mean() > 0.9
    same = truth[0].argmax(axis=1) == truth[1].argmax(axis=1)
    assert 0.5 < same.mean() < 1
    np.testing.assert_array_equal(results[top_k].same_top[decided], same[decided])


def test_a_model_does_not_diverge_from_itself(engines, references):
    from compare.reference import compare_with

    for reference in references.values():
        result = compare_with(engines[0], reference)
        assert (result.kl == 0).all()
        assert (result.estimate == 0).all()
        assert all(value == 0 for value in result.kl_of_fewer.values())
        assert result.same_top.all()
        np.testing.assert_array_equal(result.next_logprobs, reference.next_logprobs)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("kld") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def reference_file(runner, model_folder, text_file) -> Path:
    """Written by the program itself."""
    from score_kld import main

    path = text_file.with_name("reference.safetensors")
    main(
        ["write", "--model", str(model_folder("llama")), "--text", str(text_file)]
        + ["--context-length", str(CONTEXT), "--stride", str(STRIDE)]
        + ["--top-k", "8", "--tail-samples", str(SAMPLES)]
        + ["--reference", str(path), *FLAGS]
    )
    return path


def test_the_program_from_end_to_end(
    reference_file, references, results, model_folder, noisy_folder, capsys
):
    from score_kld import main

    def compare(folder: Path) -> dict:
        report = reference_file.with_name("report.json")
        main(
            ["compare", "--model", str(folder), "--reference", str(reference_file)]
            + ["--json", str(report), *FLAGS]
        )
        return json.loads(report.read_text())

    count = len(references[8].logprobs)
    assert reference_file.stat().st_size < count * VOCABULARY * 2 / 10
    itself = compare(model_folder("llama"))
    assert itself["kl_lower_bound"]["mean"] == itself["kl_lower_bound"]["max"] == 0
    assert itself["kl_estimate"] == {"mean": 0, "standard_error": 0}
    assert itself["same_top_token"]["mean"] == 1
    capsys.readouterr()
    report = compare(noisy_folder)
    assert report["positions"] == count
    for key, values in (
        ("kl_lower_bound", results[8].kl),
        ("kl_estimate", results[8].estimate),
        ("same_top_token", results[8].same_top),
    ):
        assert report[key]["mean"] == pytest.approx(values.mean(), abs=TOLERANCE)
    median = np.median(results[8].kl)
    assert report["kl_lower_bound"]["p50"] == pytest.approx(median, abs=TOLERANCE)
    output = capsys.readouterr().out
    assert f"{report['kl_lower_bound']['mean']:.4g}" in output
    assert f"{report['perplexity']['model']:.4f}" in output


@pytest.fixture
def refuse(capsys):
    """Runs the program, which must stop; what it says."""
    from score_kld import main

    def run(*arguments) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, arguments)])
        assert stopped.value.code
        return f"{stopped.value.code} {capsys.readouterr().err}"

    return run


@pytest.mark.any_runner
@pytest.mark.parametrize(
    ("family", "what"), [("qwen2", "vocabulary"), ("stranger", "tokenizer")]
)
def test_another_vocabulary_is_refused(
    reference_file, model_folder, tmp_path, refuse, family, what
):
    if family == "stranger":
        folder = model_folder("llama")
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        words = tokenizer["model"]["vocab"]
        one, other = list(words)[100:102]
        words[one], words[other] = words[other], words[one]
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        tmp_path = model_folder(family)
    said = refuse("compare", "--model", tmp_path, "--reference", reference_file, *FLAGS)
    assert f"the same {what}" in said


@pytest.mark.any_runner
def test_a_damaged_or_foreign_file_is_refused(reference_file, tmp_path, refuse):
    from compare.files import ReferenceFile
    from safetensors.numpy import load_file, save_file

    damaged = tmp_path / "damaged"
    damaged.write_bytes(reference_file.read_bytes()[:-100])
    assert str(damaged) in refuse("compare", "--reference", damaged)
    assert "missing" in refuse("compare", "--reference", tmp_path / "missing")
    foreign = tmp_path / "foreign"
    tensors = load_file(reference_file)
    save_file(tensors, foreign)
    assert "no reference file" in refuse("compare", "--reference", foreign)
    changed = tmp_path / "changed"
    tensors["token_ids"][3] += 1
    metadata = ReferenceFile(reference_file).metadata
    save_file(tensors, changed, metadata=metadata)
    assert "fingerprint" in refuse("compare", "--reference", changed)


@pytest.mark.any_runner
def test_no_file_for_the_report_is_refused_before_it_is_made(reference_file, refuse):
    arguments = ["compare", "--reference", reference_file, "--json", "/missing/x.json"]
    assert "--json" in refuse(*arguments)


@pytest.mark.any_runner
def test_more_scores_than_a_request_may_have_are_refused(
    runner, model_folder, text_file, tmp_path, refuse, monkeypatch
):
    import score_kld

    monkeypatch.setattr(score_kld, "MAX_SCORES", 31 * (1 + 20 + 16) - 1)
    arguments = ["--model", model_folder("llama"), "--text", text_file, *FLAGS]
    arguments += ["--context-length", 32, "--stride", 32, "--top-k", 20]
    path = tmp_path / "reference"
    assert "--top-k 20" in refuse("write", *arguments, "--reference", path)


@pytest.mark.any_runner
@pytest.mark.parametrize(
    "wrong",
    [
        ["--top-k", "0"],
        ["--tail-samples", "0"],
        ["--stride", "0"],
        ["--top-k", VOCABULARY + 1],
        ["--reference", "/missing/folder/reference"],
        ["--reference", "/"],
        ["--limit-tokens", "-5"],
        ["--num-samples", "0"],
    ],
)
def test_impossible_requests_are_refused(
    runner, model_folder, text_file, tmp_path, refuse, wrong
):
    path = tmp_path / "reference"
    arguments = ["--model", model_folder("llama"), "--text", text_file, *FLAGS]
    arguments += ["--context-length", 32, "--reference", path, *wrong]
    assert wrong[0] in refuse("write", *arguments)
    assert not path.exists()


def test_no_rounding_makes_a_divergence_negative_or_nan():
    from compare.divergence import divergence, tail_mass

    rng = np.random.default_rng(0)
    for scale in (1, 30, 300):
        p, q = (log_softmax(scale * rng.normal(size=(200, 20))) for _ in range(2))
        for k in (1, 19, 20):
            few = [np.sort(x.astype(np.float32))[:, -k:] for x in (p, q)]
            kl = divergence(few[0], tail_mass(few[0]), few[1], tail_mass(few[1]))
            assert (kl >= 0).all()
    certain = np.array([[0.0, -np.inf]])
    other = np.array([[-np.inf, 0.0]])
    none = np.zeros(1)
    assert divergence(certain, none, certain, none) == 0
    assert np.isposinf(divergence(certain, none, other, none))


def test_parts_without_a_finite_position_have_no_weight():
    from compare.divergence import Comparison
    from score_kld import join

    def part(kl: list[float], of_fewer: float) -> Comparison:
        zeros = np.zeros(len(kl))
        return Comparison(np.array(kl), {1: of_fewer}, np.array(kl), *[zeros] * 5)

    joined = join([part([1.0, np.inf], 1.0), part([np.inf], np.nan), part([3, 3, 3], 3.0)])
    assert joined.kl_of_fewer == {1: 2.5} and len(joined.kl) == 6


def test_draws_from_the_tail_are_uniform_and_outside_the_candidates():
    from compare.reference import draw_from_tail

    top = np.array([[0, 3, 9], [7, 6, 5]])
    drawn = draw_from_tail(np.random.default_rng(0), top, 10, 7000)
    for row, candidates in zip(drawn, top):
        counts = np.bincount(row, minlength=10)
        assert not counts[candidates].any()
        # A count is 1000 on average, with a deviation of 29.
        assert np.abs(np.delete(counts, candidates) - 1000).max() < 150
    assert draw_from_tail(np.random.default_rng(0), top, 3, 5).shape == (2, 0)
