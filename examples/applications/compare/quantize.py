# SPDX-License-Identifier: Apache-2.0
"""Quantize a model to a compressed-tensors checkpoint: `compare quantize --help`.

Rounds to nearest, with scales from each group's extremes (min-max): what
llm-compressor's `QuantizationModifier` does with a data-free scheme. The schemes, the
arithmetic and the format are compressed-tensors', the library that llm-compressor and
vLLM share. Nothing is calibrated, so better 4-bit checkpoints can be made (GPTQ, AWQ);
this is the recipe of the checkpoints in the gallery and the tests.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compare.texts import REFERENCE_MODEL

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers import PreTrainedModel

SCHEMES = ("W8A8", "W8A16", "W4A16", "W4A16_ASYM", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK")
"""Names that compressed-tensors gives them: W and A are the bits of weights and
activations. All quantize activations, if at all, by their own extremes at run time."""
HEAD = "lm_head"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(REFERENCE_MODEL / "model"))
    parser.add_argument("--scheme", required=True, choices=SCHEMES)
    parser.add_argument("--group-size", type=int,
                        help="weights that share a scale, for the schemes with groups "
                        "(default: 128)")  # fmt: skip
    parser.add_argument("--head", action="store_true",
                        help="quantize the LM head too; a tied one is untied")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--trust-remote-code", action="store_true")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output: {args.output} is no folder")
    if args.output.exists() and any(args.output.iterdir()):
        parser.error(f"--output: {args.output} is not empty")
    if args.group_size is not None and args.group_size < 1:
        parser.error("--group-size must be at least 1")


def run(args: argparse.Namespace) -> None:
    size = quantize(
        args.model, args.output, args.scheme, group_size=args.group_size,
        head=args.head, trust_remote_code=args.trust_remote_code,
    )  # fmt: skip
    print(f"{args.output}: {args.scheme}, {size:,} bytes of weights")


def quantize(
    model: str | Path,
    output: Path,
    scheme: str,
    *,
    group_size: int | None = None,
    head: bool = False,
    trust_remote_code: bool = False,
) -> int:
    """Writes the checkpoint.

    Returns:
        Bytes of its weights.

    Raises:
        ValueError: the scheme has no groups, or they do not divide a layer's inputs.
    """
    from compressed_tensors.compressors import ModelCompressor
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": trust_remote_code}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", **options)
    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    if head:
        untie_head(loaded)
    apply_scheme(loaded, make_scheme(scheme, group_size, head), head)
    compressor = ModelCompressor.from_pretrained_model(loaded)
    compressor.compress_model(loaded)
    loaded.save_pretrained(output)
    compressor.update_config(str(output))
    tokenizer.save_pretrained(output)
    return sum(path.stat().st_size for path in output.glob("*.safetensors"))


def make_scheme(name: str, group_size: int | None, head: bool) -> "QuantizationScheme":
    from compressed_tensors.quantization import preset_name_to_scheme

    # vLLM does not take a head for a linear layer, so it is named.
    scheme = preset_name_to_scheme(name, ["Linear", *([f"re:.*{HEAD}"] if head else [])])
    if group_size is not None:
        if scheme.weights.strategy != "group":
            raise ValueError(f"--group-size: {name} has no groups")
        scheme.weights.group_size = group_size
    return scheme


def untie_head(model: "PreTrainedModel") -> None:
    """Gives the head weights of its own, equal to those of the embedding."""
    import torch

    table = model.get_output_embeddings()
    table.weight = torch.nn.Parameter(table.weight.detach().clone())
    model.config.tie_word_embeddings = False


def apply_scheme(
    model: "PreTrainedModel", scheme: "QuantizationScheme", head: bool
) -> None:
    """Gives every linear layer the scheme and the scales of its own weights. From then
    on the model computes, in Transformers, as if quantized."""
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
    )

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=[] if head else [HEAD]
    )
    apply_quantization_config(model, config)
    check_layers(model)
    for name, layer in model.named_modules():
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        try:
            scale, zero = scale_of(layer.weight.detach(), scheme.weights)
        except RuntimeError as error:
            raise ValueError(f"--group-size: {name}: {error}") from None
        layer.weight_scale.data.copy_(scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero)


def check_layers(model: "PreTrainedModel") -> None:
    """Refuses a model with products that would stay as they are, unlike what its config
    says, as those of experts and of GPT-2."""
    import torch

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            continue
        for field, parameter in layer.named_parameters(recurse=False):
            if parameter.dim() > 1:
                raise ValueError(
                    f"--model: {name}.{field} is of a {type(layer).__name__}, and only "
                    "linear layers can be quantized here"
                )


def scale_of(
    weight: "torch.Tensor", args: "QuantizationArgs"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Scales and zero points of a weight `[out, in]`, from the extremes of each row,
    group of a row, or block."""
    from compressed_tensors.quantization.utils import calculate_qparams

    if args.strategy == "channel":
        groups, axes = weight, (1,)
    elif args.strategy == "group":
        groups, axes = weight.unflatten(1, (-1, args.group_size)), (2,)
    elif args.strategy == "block":
        height, width = args.block_structure
        groups = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        axes = (1, 3)
    else:
        raise ValueError(f"no scales for {args.strategy}")
    low, high = groups.amin(axes), groups.amax(axes)
    if args.strategy == "channel":
        low, high = low[:, None], high[:, None]
    return calculate_qparams(low, high, args)
