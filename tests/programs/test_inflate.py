# SPDX-License-Identifier: Apache-2.0
"""An inflated model computes what the small one does: against Transformers, float32."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "reference_model"))

import inflate

TOLERANCE = 1e-4
"""Of a logit: sums over the same terms, in another order, 12 layers deep."""
IMPOSSIBLE = -1000.0
"""A logit below this is a probability of 0 in float32, whatever the others are."""
VOCABULARY = 4096 + 128


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    inflate.inflate_model(inflate.REFERENCE, folder, 4, VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def models(wide):
    from transformers import AutoModelForCausalLM

    def load(folder: Path):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return load(inflate.REFERENCE), load(wide)


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    """`[3, 200]`: a source file, and tokens drawn at random."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inflate.REFERENCE)
    text = Path(inflate.__file__).read_text()
    real = tokenizer.encode(text, verbose=False)[:200]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(4096, (2, 200), generator=generator)
    return torch.cat([torch.tensor([real]), drawn])


def test_logits_are_the_small_models(models, token_ids):
    small, large = models
    with torch.inference_mode():
        wanted = small(token_ids).logits
        found = large(token_ids).logits[..., : wanted.shape[-1]]
    assert (found - wanted).abs().max() < TOLERANCE


def test_new_tokens_are_impossible(models, token_ids):
    _, large = models
    with torch.inference_mode():
        logits = large(token_ids).logits
    assert logits.shape[-1] == VOCABULARY
    assert logits[..., 4096:].max() < IMPOSSIBLE


def test_new_tokens_are_impossible_after_every_layer(models, token_ids):
    """Tokens may exit there."""
    _, large = models
    with torch.inference_mode():
        states = large(token_ids, output_hidden_states=True).hidden_states[1:-1]
        for state in states:
            logits = large.lm_head(large.model.norm(state))
            assert logits[..., 4096:].max() < IMPOSSIBLE


def test_the_shape_is_a_wide_models(wide):
    config = json.loads((wide / "config.json").read_text())
    assert config["hidden_size"] == 1024
    assert config["intermediate_size"] == 3072
    assert config["num_attention_heads"] == 16
    assert config["num_key_value_heads"] == 8
    assert config["vocab_size"] == VOCABULARY
    weights = load_file(wide / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (VOCABULARY, 1024)


def test_the_tokenizer_comes_along(wide):
    names = {path.name for path in inflate.REFERENCE.glob("tokenizer*")}
    assert names and names <= {path.name for path in wide.iterdir()}


def test_without_new_tokens_nothing_is_added(tmp_path):
    inflate.inflate_model(inflate.REFERENCE, tmp_path, 4)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert embeddings.shape == (4096, 1024)
    assert not embeddings[:, 256:].any()


def test_a_head_whose_size_is_not_written(tmp_path):
    """Llama's configuration may leave it out."""
    small = tmp_path / "small"
    shutil.copytree(inflate.REFERENCE, small)
    path = small / "config.json"
    config = json.loads(path.read_text())
    size = config.pop("head_dim")
    path.write_text(json.dumps(config))
    inflate.inflate_model(small, tmp_path / "wide", 4, VOCABULARY)
    wide = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert wide["hidden_size"] // wide["num_attention_heads"] == size


def test_a_smaller_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="4096 tokens already"):
        inflate.inflate_model(inflate.REFERENCE, tmp_path, 4, 100)


@pytest.fixture
def calibration(tmp_path) -> Path:
    """Of random weights, for two cutoffs, with a narrow translator."""
    generator = torch.Generator().manual_seed(0)
    shapes = {}
    for name in inflate.PROBES:
        shapes |= {
            f"{name}_weight_1": (2, 8, 256),
            f"{name}_bias_1": (2, 8),
            f"{name}_weight_2": (2, 8),
            f"{name}_bias_2": (2,),
        }
    shapes |= {
        "translator_weight": (2, 256, 256),
        "translator_bias": (2, 256),
        "translator_weight_1": (2, 32, 256),
        "translator_bias_1": (2, 32),
        "translator_weight_2": (2, 256, 32),
    }
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    embeddings = load_file(inflate.REFERENCE / "model.safetensors")
    ids = torch.tensor([0, 7, 4095])
    tensors["token_ids"] = ids
    tensors["token_embeddings"] = embeddings["model.embed_tokens.weight"][ids].float()
    metadata = {
        "format": "utio-calibration-2",
        "cutoffs": "6,9",
        "num_layers": "12",
        "hidden_size": "256",
    }
    save_file(tensors, tmp_path / "small.safetensors", metadata=metadata)
    return tmp_path / "small.safetensors"


def probe(tensors: dict, name: str, state: torch.Tensor) -> torch.Tensor:
    weight_1, bias_1, weight_2, bias_2 = (
        tensors[f"{name}_{part}"][1] for part in ("weight_1", "bias_1", "weight_2", "bias_2")
    )
    inner = features(state) @ weight_1.T + bias_1
    return torch.nn.functional.gelu(inner) @ weight_2 + bias_2


def translate(tensors: dict, state: torch.Tensor) -> torch.Tensor:
    x = features(state)
    inner = x @ tensors["translator_weight_1"][1].T + tensors["translator_bias_1"][1]
    linear = x @ tensors["translator_weight"][1].T + tensors["translator_bias"][1]
    gelu = torch.nn.functional.gelu(inner)
    return linear + gelu @ tensors["translator_weight_2"][1].T


def features(state: torch.Tensor) -> torch.Tensor:
    return state / state.square().mean(-1, keepdim=True).sqrt()


def test_a_calibration_says_the_same(calibration, models, token_ids, tmp_path):
    inflate.inflate_calibration(calibration, tmp_path / "wide.safetensors", 4)
    small, large = load_file(calibration), load_file(tmp_path / "wide.safetensors")
    model, wide_model = models
    state = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) * 10
    wide_state = inflate.pad(state, 5, 1024)
    for name in inflate.PROBES:
        found = probe(large, name, wide_state)
        torch.testing.assert_close(found, probe(small, name, state))
    with torch.inference_mode():
        wanted = model.lm_head(model.model.norm(translate(small, state)))
        states = translate(large, wide_state)
        found = wide_model.lm_head(wide_model.model.norm(states))
    assert (found[:, :4096] - wanted).abs().max() < TOLERANCE
    assert found[:, 4096:].max() < IMPOSSIBLE


def test_a_calibration_still_knows_its_model(calibration, wide, tmp_path):
    inflate.inflate_calibration(calibration, tmp_path / "wide.safetensors", 4)
    tensors = load_file(tmp_path / "wide.safetensors")
    embeddings = load_file(wide / "model.safetensors")["model.embed_tokens.weight"]
    found = embeddings[tensors["token_ids"]].float()
    # All but the tiny constant that keeps new tokens out.
    difference = (found - tensors["token_embeddings"]).abs()
    assert difference.max() <= inflate.CONSTANT
