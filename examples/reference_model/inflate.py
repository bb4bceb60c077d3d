# SPDX-License-Identifier: Apache-2.0
"""Pads a trained Llama with zeros to a realistic width; what it computes stays the same.

    .venv/bin/python examples/reference_model/inflate.py --times 4 --vocabulary 131072 \\
        --output build/models/wide

Speed depends on the width of a model, quality on what it was trained for, and small
trained models are the ones that can be shipped. An inflated model has both: its products
cost what those of a wide model cost, and its log-probabilities are the small model's. So
a ratio of speed and the quality beside it come from one run of one model. Whoever shows
such figures should say that the model is inflated.

Width: hidden size, intermediate size and numbers of heads are multiplied by `--times`.
New rows and columns are 0, so that the new entries of each state stay 0. A norm divides
by the root of the mean over all entries, which is smaller by sqrt(times) now, so its
weight is divided by sqrt(times), and its epsilon, inside the root, by times. Both are
powers of 2, so nothing is rounded.

Vocabulary: the head needs rows for tokens that no text has, and a row of zeros would win
against a token whose logit is negative. So the first new entry of the state is a tiny
constant, CONSTANT, in the embedding of every old token; nothing adds to it, as the rows
that write it are 0; only the final norm lets it through; and in the embedding of each new
token it is -FAR. The new tokens' logits are then -FAR x CONSTANT / rms(state), so small
that their probabilities are 0 in float32. What the constant adds to the mean of the
squares is below the rounding of float32.

`--calibration` also inflates a file of utio_calibrate.py, to the translator width that it
would choose for the wide model.
"""

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

REFERENCE = Path(__file__).parent / "model"
TIMES = (4, 16)
"""Even powers of 2, so that their square roots are exact in bfloat16."""
CONSTANT = 2.0**-14
FAR = 2.0**32
"""-FAR x CONSTANT / rms is below -1,000 as long as a state's rms is below 256."""

PROBES = ("probe", "acceptance_greedy", "acceptance_sampled")
READ_FEATURES = (
    *(f"{name}_weight_1" for name in PROBES),
    "translator_weight",
    "translator_weight_1",
)
"""Weights of a calibration that are multiplied with a state over its rms."""


class Shape(NamedTuple):
    """Sizes of a Llama. A head's size does not change."""

    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head: int
    vocabulary: int

    @classmethod
    def of(cls, config: dict) -> "Shape":
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            config["vocab_size"],
        )

    def times(self, factor: int, vocabulary: int | None) -> "Shape":
        return Shape(
            self.hidden * factor,
            self.intermediate * factor,
            self.heads * factor,
            self.key_value_heads * factor,
            self.head,
            vocabulary or self.vocabulary,
        )


def main() -> None:
    args = parse_args()
    try:
        inflate_model(args.model, args.output, args.times, args.vocabulary)
        if args.calibration:
            inflate_calibration(args.calibration, args.calibration_output, args.times)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=REFERENCE, metavar="FOLDER",
                        help="a Llama in one safetensors file, head and embeddings "
                        "tied (default: the reference model)")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--times", type=int, choices=TIMES, default=TIMES[0],
                        help="width over the old one (default: %(default)s)")  # fmt: skip
    parser.add_argument("--vocabulary", type=int, metavar="TOKENS",
                        help="default: as it is; a new token is never likely")  # fmt: skip
    parser.add_argument("--calibration", type=Path, metavar="FILE",
                        help="of utio_calibrate.py for that model")  # fmt: skip
    parser.add_argument("--calibration-output", type=Path, metavar="FILE")
    args = parser.parse_args()
    if bool(args.calibration) != bool(args.calibration_output):
        parser.error("--calibration and --calibration-output go together")
    return args


def inflate_model(
    source: Path, target: Path, times: int, vocabulary: int | None = None
) -> None:
    """Writes the wide model, its tokenizer beside it; config.json last.

    Raises:
        ValueError: not a Llama that this can pad, or a vocabulary below its own.
    """
    config = json.loads((source / "config.json").read_text())
    check(config, vocabulary)
    old = Shape.of(config)
    new = old.times(times, vocabulary)
    weights = load_file(source / "model.safetensors")
    wide = {name: inflate(name, x, old, new) for name, x in weights.items()}
    add_constant(wide, old)
    target.mkdir(parents=True, exist_ok=True)
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    for file in (*source.glob("tokenizer*"), *source.glob("generation_config.json")):
        shutil.copy(file, target)
    config |= {
        "hidden_size": new.hidden,
        "intermediate_size": new.intermediate,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.key_value_heads,
        "vocab_size": new.vocabulary,
        "rms_norm_eps": config["rms_norm_eps"] / times,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check(config: dict, vocabulary: int | None) -> None:
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{config['architectures']} is not LlamaForCausalLM")
    if not config.get("tie_word_embeddings"):
        raise ValueError("the head is not tied to the embeddings")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("layers have biases")
    if vocabulary is not None and vocabulary < config["vocab_size"]:
        raise ValueError(f"the vocabulary has {config['vocab_size']} tokens already")


def inflate(name: str, weight: torch.Tensor, old: Shape, new: Shape) -> torch.Tensor:
    """One weight of the wide model.

    Raises:
        ValueError: no weight of a Llama has that name.
    """
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in ("input_layernorm", "post_attention_layernorm", "norm"):
        scaled = weight.float() * math.sqrt(old.hidden / new.hidden)
        return pad(scaled.to(weight.dtype), new.hidden)
    queries, keys = new.heads * new.head, new.key_value_heads * new.head
    shapes = {
        "embed_tokens": (new.vocabulary, new.hidden),
        "q_proj": (queries, new.hidden),
        "k_proj": (keys, new.hidden),
        "v_proj": (keys, new.hidden),
        "o_proj": (new.hidden, queries),
        "gate_proj": (new.intermediate, new.hidden),
        "up_proj": (new.intermediate, new.hidden),
        "down_proj": (new.hidden, new.intermediate),
    }
    if part not in shapes:
        raise ValueError(f"{name} is no weight of a Llama")
    return pad(weight, *shapes[part])


def pad(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """`tensor` in the corner of zeros."""
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def add_constant(weights: dict[str, torch.Tensor], old: Shape) -> None:
    """Makes the tokens that are new impossible, in place."""
    embeddings = weights["model.embed_tokens.weight"]
    if len(embeddings) == old.vocabulary:
        return
    embeddings[: old.vocabulary, old.hidden] = CONSTANT
    embeddings[old.vocabulary :, old.hidden] = -FAR
    weights["model.norm.weight"][old.hidden] = 1.0


def inflate_calibration(source: Path, target: Path, times: int) -> None:
    """Writes what utio_calibrate.py fitted to the small model, for the wide one.

    Its features are states over their root mean square, which is smaller by
    sqrt(times) in the wide model; translations go through the final norm alone, which
    does not mind their scale. They carry the constant that keeps new tokens out.
    """
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    old = int(metadata["hidden_size"])
    new = old * times
    firsts = (f"{name}_weight_1" for name in PROBES)
    shapes = {
        name: (*tensors[name].shape[:2], new) for name in firsts if name in tensors
    }
    cutoffs = len(tensors["probe_bias_2"])
    if "translator_weight" in tensors:
        width = tensors["translator_weight_1"].shape[1] * times
        shapes |= {
            "translator_weight": (cutoffs, new, new),
            "translator_bias": (cutoffs, new),
            "translator_weight_1": (cutoffs, width, new),
            "translator_bias_1": (cutoffs, width),
            "translator_weight_2": (cutoffs, new, width),
        }
    for name, shape in shapes.items():
        scale = 1 / math.sqrt(times) if name in READ_FEATURES else 1.0
        tensors[name] = pad(tensors[name].float() * scale, *shape)
    if "translator_bias" in tensors:
        tensors["translator_bias"][:, old] = CONSTANT
    if "token_embeddings" in tensors:
        embeddings = tensors["token_embeddings"]
        tensors["token_embeddings"] = pad(embeddings, len(embeddings), new)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, metadata=metadata | {"hidden_size": str(new)})


if __name__ == "__main__":
    main()
