# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints that `compare quantize` makes: vLLM's scores of them against
Transformers in float32 on the dequantized weights, with tied and with quantized head.
Of schemes that round activations too, Transformers' linear layers round their inputs as
`ROUNDINGS` does: plain PyTorch, which shares no code with vLLM or compressed-tensors."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import forks
import numpy as np
import pytest
import runners
import torch
from compare_models import true_logprobs
from oracle import Oracle
from safetensors.torch import load_file
from scoring import FLOAT32_TOLERANCE, random_ids
from tiny_models import CONFIGS, save_model
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "applications"))

from compare.quantize import quantize
from compare.windows import Window, cut

CONTEXT = 128
CASES = {
    "W4A16": ("llama", dict(scheme="W4A16", group_size=32)),
    "W4A16, tied head": ("qwen2", dict(scheme="W4A16", group_size=32)),
    "W4A16, quantized head": ("llama", dict(scheme="W4A16", group_size=32, head=True)),
    "W4A16, untied": ("qwen2", dict(scheme="W4A16", group_size=32, head=True)),
    "W4A16, zero points": ("llama", dict(scheme="W4A16_ASYM", group_size=32)),
}
ROUNDED = {
    "W8A8": ("llama", dict(scheme="W8A8")),
    "W8A8, tied head": ("qwen2", dict(scheme="W8A8")),
    "W8A8, quantized head": ("llama", dict(scheme="W8A8", head=True)),
    "W8A8, untied": ("qwen2", dict(scheme="W8A8", head=True)),
    "FP8": ("llama", dict(scheme="FP8_DYNAMIC")),
    "FP8, tied head": ("qwen2", dict(scheme="FP8_DYNAMIC")),
    "FP8, quantized head": ("llama", dict(scheme="FP8_DYNAMIC", head=True)),
    "FP8, untied": ("qwen2", dict(scheme="FP8_DYNAMIC", head=True)),
    "W4A8": ("llama", dict(scheme="W4A8", group_size=32)),
    "W4A8, untied": ("qwen2", dict(scheme="W4A8", group_size=32, head=True)),
}
ON_V2 = ("W4A16, tied head", "W4A16, quantized head", "W8A8, quantized head", "FP8, tied head")
"""The linear layers are the model's, the same on both runners. Of these only the head is
run by the runner."""
OPTIONS = dict(
    enforce_eager=True, kv_cache_memory_bytes=64 * 2**20,
    max_model_len=CONTEXT, enable_prefix_caching=False, max_logprobs=2000,
)  # fmt: skip
WINDOWS = [Window(random_ids(seed, 500, CONTEXT), CONTEXT - 1) for seed in range(4)]


class Dequantized(Oracle):
    """Transformers on a checkpoint's weights as they are after dequantization, in
    float32."""

    def __init__(self, folder: Path):
        config = CompressedTensorsConfig(run_compressed=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, attn_implementation="eager"
        )
        self._model = model.to(torch.float32).eval()
        self._logits = {}


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Each row (token) to 255 steps of its greatest size over 127."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / step).round() * step


def to_int8_with_zero_point(x: torch.Tensor) -> torch.Tensor:
    """Each row to 256 steps from its least to its greatest value, 0 among them. The
    checkpoint of a W4A8 model says that they are symmetric; PyTorch's kernel, which
    vLLM uses on a CPU, has a zero point all the same."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    step = (x.amax(-1, keepdim=True).clamp(min=0) - low).clamp(min=1e-12) / 255
    zero = (-128 - low / step).round()
    return (((x / step).round() + zero).clamp(-128, 127) - zero) * step


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Each row, its greatest size scaled to 448, to the next number of 4 exponent and
    3 mantissa bits."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / step).to(torch.float8_e4m3fn).float() * step


ROUNDINGS = {
    "W8A8": to_int8, "FP8_DYNAMIC": to_fp8, "W4A8": to_int8_with_zero_point
}  # fmt: skip


class Emulated(Oracle):
    """Transformers in float32 on a checkpoint's stored weights times their scales, with
    the inputs of the quantized layers rounded."""

    def __init__(self, folder: Path, rounding: Callable[[torch.Tensor], torch.Tensor]):
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        weights = load_file(folder / "model.safetensors")
        names = [name for name in weights if name.endswith("_scale")]
        for name in names:
            scale = weights.pop(name).float()  # [out, groups]
            stored = weights[name.removesuffix("_scale")].float()  # [out, in]
            repeats = stored.shape[1] // scale.shape[1]
            scale = scale.repeat_interleave(repeats, dim=1)
            weights[name.removesuffix("_scale")] = stored * scale
            layer = model.get_submodule(name.removesuffix(".weight_scale"))
            layer.register_forward_pre_hook(lambda _, x: (rounding(x[0]),))
        found = model.load_state_dict(weights, strict=False)
        tied = ["lm_head.weight"] if config.tie_word_embeddings else []
        assert names and found == (tied, [])
        model.tie_weights()
        self._model, self._logits = model.eval(), {}


@pytest.fixture
def name(request, runner) -> str:
    """Of a case that this runner has."""
    if runner == "v2" and request.param not in ON_V2:
        pytest.skip("the layers are tested on V1")
    return request.param


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Models whose weights are bfloat16, as those are that one quantizes."""

    @cache
    def make(family: str) -> Path:
        folder = save_model(family, tmp_path_factory.mktemp(family))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def logprobs(runner):
    """vLLM's log-probabilities of all words at all scored positions of a model."""
    from compare.reference import score
    from vllm import LLM

    @cache
    def run(folder: Path, words: int, dtype: str = "bfloat16") -> np.ndarray:
        llm = LLM(str(folder), dtype=dtype, **OPTIONS)
        positions = sum(window.scored for window in WINDOWS)
        named = np.tile(np.arange(words), (positions, 1))
        return score(llm, WINDOWS, named)[0][:, 1:].astype(np.float64)

    return run


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


@pytest.mark.parametrize("name", CASES, indirect=True)
def test_scores_are_those_of_the_dequantized_weights(name, source, logprobs, tmp_path):
    family, options = CASES[name]
    folder, words = source(family), CONFIGS[family].vocab_size
    quantize(folder, tmp_path, **options)
    expected = true_logprobs(Dequantized(tmp_path), WINDOWS)
    error = root_mean_square(logprobs(tmp_path, words) - expected)
    loss = root_mean_square(true_logprobs(Oracle(folder), WINDOWS) - expected)
    # What bfloat16 makes of the same model without quantization.
    plain = true_logprobs(Oracle(folder), WINDOWS)
    rounding = root_mean_square(logprobs(folder, words) - plain)
    assert error < 1.5 * rounding
    assert loss > 3 * rounding


@pytest.mark.parametrize("name", ROUNDED, indirect=True)
def test_scores_are_those_of_rounded_activations(name, source, logprobs, tmp_path):
    """In float32. What is left are activations that lie within a float's error of the
    middle between two steps: they may be rounded to either, which changes the window's
    positions from there on a little."""
    family, options = ROUNDED[name]
    quantize(source(family), tmp_path, **options)
    got = logprobs(tmp_path, CONFIGS[family].vocab_size, "float32")
    rounding = ROUNDINGS[options["scheme"]]
    expected = true_logprobs(Emulated(tmp_path, rounding), WINDOWS)
    unrounded = true_logprobs(Emulated(tmp_path, lambda x: x), WINDOWS)
    exact = (np.abs(got - expected) < FLOAT32_TOLERANCE).all(axis=1).mean()
    error, effect = (root_mean_square(x - expected) for x in (got, unrounded))
    assert exact > 1 / 3  # with another rounding, none
    assert error < effect / 2


def test_a_scheme_that_has_no_kernel_is_refused(runner, source, tmp_path):
    from compare.engine import new_engine

    quantize(source("llama"), tmp_path, "W8A16")
    with pytest.raises(SystemExit, match="Failed to find a kernel"):
        new_engine("context_length", model=str(tmp_path), dtype="bfloat16", **OPTIONS)


def test_a_checkpoint_is_small_and_says_what_it_is(source, tmp_path):
    size = quantize(source("llama"), tmp_path, "W4A16", group_size=32)
    whole = (source("llama") / "model.safetensors").stat().st_size
    assert size == (tmp_path / "model.safetensors").stat().st_size < whole
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--scheme", "W3A16"], "--scheme"),
        (["--scheme", "W8A8", "--group-size", "32"], "--group-size: W8A8"),
        (["--scheme", "W4A16", "--group-size", "48"], "--group-size"),
        (["--scheme", "W4A16", "--group-size", "0"], "--group-size"),
        (["--scheme", "W8A8", "--model", "/no/where"], "/no/where"),
        (["--scheme", "W8A8", "--output", str(EXAMPLES)], "--output"),
        (["gpt2"], "--model: transformer.h.0.attn.c_attn.weight is of a Conv1D"),
        (["deep_qwen3_moe"], "--model: model.layers.0.mlp"),
    ],
)
def test_what_can_not_be_quantized_is_refused(source, wrong, said, tmp_path, capsys):
    from compare.cli import main

    family = "llama"
    if not wrong[0].startswith("-"):
        family, *wrong = *wrong, "--scheme", "W8A8"
    arguments = ["--model", str(source(family)), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", *arguments, *wrong])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def rows() -> list[str]:
    """Lines, with empty rows among them as in WikiText."""
    lines = (EXAMPLES.parent / "README.md").read_text().splitlines(keepends=True)
    return [row for line in lines for row in ("", line, "")] * 3


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory) -> Path:
    """A folder of the form of the data set `wikitext` at the hub: a Parquet file a
    split, configurations named in the card."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("hub") / "wikitext"
    data = folder / "wikitext-2-raw-v1"
    data.mkdir(parents=True)
    Dataset.from_dict({"text": rows()}).to_parquet(data / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n"
        "  - split: test\n    path: wikitext-2-raw-v1/test-*\n---\n"
    )
    return folder


@pytest.fixture(scope="module")
def long_context(source, tmp_path_factory) -> Path:
    """A W4A16 checkpoint of a model with a context of 2048."""
    folder = tmp_path_factory.mktemp("long")
    for file in source("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    output = tmp_path_factory.mktemp("w4a16")
    quantize(folder, output, "W4A16", group_size=32)
    return output


def test_the_command_of_the_score_mode_notes(
    runner, wikitext, long_context, tmp_path
):
    """As it is written there, `--enforce-eager` beside it, in a folder where `wikitext`
    is. Its perplexity is that of the dequantized weights, but for bfloat16."""
    if runner == "v2":
        pytest.skip("it is about a command line; the scores are tested on V2 too")
    report = tmp_path / "report.json"
    command = [
        EXAMPLES / "score_mode_perplexity.py", "--model", long_context,
        "--quantization", "compressed-tensors", "--dataset", "wikitext",
        "--dataset-config", "wikitext-2-raw-v1", "--num-samples", "500",
        "--context-length", "2048", "--stride", "512", "--tensor-parallel-size", "1",
        "--gpu-memory-utilization", "0.95", "--trust-remote-code",
        "--enforce-eager", "--json", report,
    ]  # fmt: skip
    environment = runners.environment(runner) | {"HF_HOME": str(tmp_path / "hub")}
    done = forks.run(command, environment, wikitext.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["context_length"] == 2048 and found["stride"] == 512
    text = "\n\n".join(rows()[:500])
    from tiny_models import make_tokenizer

    windows = cut(make_tokenizer()(text)["input_ids"], 2048, 512)
    assert found["windows"] == len(windows) > 4
    assert found["scored_tokens"] == sum(window.scored for window in windows)
    expected = true_logprobs(Dequantized(long_context), windows)
    ids = [i for ids, scored in windows for i in ids[-scored:]]
    mean = -expected[np.arange(len(ids)), ids].mean()
    # Single ones are off by some 0.05 nats at random: a mean of thousands by 0.002.
    assert found["paths"][0]["nats_per_token"] == pytest.approx(mean, abs=0.01)
