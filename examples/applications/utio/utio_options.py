# SPDX-License-Identifier: Apache-2.0
"""Command lines of utio_calibrate.py and utio_tradeoff.py.

Apart from them, so that `--help` and what is wrong with an option are said before torch,
Transformers and vLLM are imported.
"""

import argparse
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2]
sys.path.append(str(EXAMPLES / "reference_model"))

from corpus import pinned_archive

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "opt")
RANDOM, TIS, ENTROPY = "random", "tis", "entropy"
PROBE, AGREEMENT = "probe", "agreement"
ORACLE, ORACLE_PERPLEXITY, ORACLE_AGREEMENT = (
    "oracle",
    "oracle-perplexity",
    "oracle-agreement",
)
CALIBRATED = (PROBE, AGREEMENT)
"""Ways of routing that a calibration is needed for."""
ORACLES = (ORACLE, ORACLE_PERPLEXITY, ORACLE_AGREEMENT)
EARLY, LATE = (RANDOM, TIS), (ENTROPY, *CALIBRATED, *ORACLES)
"""Ways that decide before a step, and at the cutoff."""


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=str(EXAMPLES / "reference_model/model"),
        help=f"folder or name of a Hugging Face model: {', '.join(FAMILIES)}",
    )  # fmt: skip


def parse_calibrate(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fits what a token that leaves early says, and what leaving costs it."
    )
    add_model(parser)
    parser.add_argument(
        "--cutoffs", type=int, nargs="+", required=True, metavar="LAYERS",
        help="layers that a token runs before it may leave, a probe for each",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.safetensors"
    )
    parser.add_argument(
        "--translators", action=argparse.BooleanOptionalAction, default=True,
        help="translate the states of tokens that leave (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--translator-width", type=int, metavar="UNITS",
        help="of the translators' hidden layer (default: the hidden size)",
    )  # fmt: skip
    parser.add_argument(
        "--probe-width", type=int, default=256, metavar="UNITS",
        help="of the probes' hidden layer (default: %(default)s)",
    )  # fmt: skip
    text = add_text_options(parser, "was trained on")
    text.add_argument("--tokens", type=int, default=100_000, help="most tokens to use")
    text.add_argument("--context-length", type=int, default=256)
    text.add_argument(
        "--holdout", type=float, default=0.2, help="share of the tokens not fitted on"
    )
    engine = parser.add_argument_group("arithmetic")
    engine.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"],
        default="float32", help="of the model; auto: as its weights are stored",
    )  # fmt: skip
    engine.add_argument("--device", help="default: cuda where there is one, else cpu")
    engine.add_argument("--batch-size", type=int, default=8, help="windows at once")
    args = parser.parse_args(argv)
    if min(args.cutoffs) < 1:
        parser.error(f"--cutoffs must be at least 1, not {min(args.cutoffs)}")
    if len(set(args.cutoffs)) < len(args.cutoffs):
        parser.error("--cutoffs names a cutoff twice")
    args.cutoffs.sort()
    if args.probe_width < 1:
        parser.error("--probe-width must be at least 1")
    if args.translator_width is not None and args.translator_width < 1:
        parser.error("--translator-width must be at least 1")
    if args.tokens < 1:
        parser.error("--tokens must be at least 1")
    if args.context_length < 4:
        parser.error("--context-length must be at least 4")
    if not 0 < args.holdout < 1:
        parser.error("--holdout must be between 0 and 1")
    if args.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    if not args.output.parent.is_dir() or args.output.is_dir():
        parser.error(f"--output {args.output}: not a file in an existing folder")
    return args


def add_text_options(parser: argparse.ArgumentParser, part: str):
    """Adds what `read_texts` reads. `part` is the archive's: the files that the
    reference model ..."""
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE",
        help="UTF-8 files, or folders of them; default: the files of vLLM's source "
        f"archive that the reference model {part}",
    )  # fmt: skip
    text.add_argument(
        "--archive", type=Path,
        default=pinned_archive(),
        help="vLLM's source archive, read if there is no --text",
    )  # fmt: skip
    return text


def parse_tradeoff(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What routing by depth saves and what it costs, for a model and a text."
    )
    add_model(parser)
    parser.add_argument(
        "--cutoffs", type=int, nargs="+", metavar="LAYERS",
        help="early exits, tried singly; default: half of the layers",
    )  # fmt: skip
    parser.add_argument(
        "--leaving", type=float, nargs="+", default=[0.3, 0.5, 0.7], metavar="SHARE",
        help="shares of the tokens that leave early",
    )  # fmt: skip
    parser.add_argument(
        "--mix", type=parse_shares, nargs="+", default=[], metavar="SHARE,SHARE...",
        help="shares that leave at each of the --cutoffs in the same step",
    )  # fmt: skip
    parser.add_argument(
        "--ways", nargs="+", choices=[*EARLY, *LATE],
        help="ways of routing; default: all, probe and agreement with --calibration only",
    )  # fmt: skip
    parser.add_argument(
        "--random-draws", type=int, default=3,
        help="of random routing, of which the mean is taken (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--drafting", type=parse_drafting, nargs="+", default=[],
        metavar="LAYERS,TOKENS",
        help="lossless: the first layers draft so many tokens, all layers verify",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of utio_calibrate.py"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the plot")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    text = add_text_options(parser, "was not trained on")
    text.add_argument("--sequences", type=int, default=64, help="batch size")
    text.add_argument("--prompt-length", type=int, default=64, help="tokens")
    text.add_argument("--forced-length", type=int, default=192, help="tokens")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", default="float32")
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--kv-cache-memory-bytes", type=int, default=2**31)
    engine.add_argument(
        "--speed-tokens", type=int, default=32, help="tokens of a timed call"
    )
    engine.add_argument(
        "--speed-rounds", type=int, default=5, help="timed pairs of calls; 0: none"
    )
    args = parser.parse_args(argv)
    least = dict(
        sequences=1,
        random_draws=1,
        prompt_length=1,
        forced_length=2,
        speed_tokens=2,
        speed_rounds=0,
        kv_cache_memory_bytes=1,
    )
    for name, value in least.items():
        if getattr(args, name) < value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}")
    if args.cutoffs:
        if args.mix and args.cutoffs != sorted(set(args.cutoffs)):
            parser.error("--cutoffs must be ascending with --mix")
        args.cutoffs = sorted(set(args.cutoffs))
        if args.cutoffs[0] < 1:
            parser.error(f"--cutoffs must be at least 1, not {args.cutoffs[0]}")
    if not all(0 < share < 1 for share in args.leaving):
        parser.error("--leaving must be between 0 and 1")
    for mix in args.mix:
        if len(mix) != len(args.cutoffs or []):
            parser.error(f"--mix {mix}: {len(mix)} shares for --cutoffs {args.cutoffs}")
        if not all(share > 0 for share in mix) or not sum(mix) <= 1 + 1e-9:
            parser.error(f"--mix {mix}: must be above 0, their sum at most 1")
    for way in CALIBRATED:
        if way in (args.ways or ()) and not args.calibration:
            parser.error(f"--ways {way} needs a --calibration")
    if not args.ways:
        known = (*EARLY, *LATE)
        args.ways = [w for w in known if args.calibration or w not in CALIBRATED]
    args.ways = list(dict.fromkeys(args.ways))
    if args.drafting and not args.speed_rounds:
        parser.error("--drafting changes the speed only, and --speed-rounds is 0")
    for name, path in {"--output": args.output, "--csv": args.csv}.items():
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"{name} {path}: not a file in an existing folder")
    if args.output:
        from matplotlib.backend_bases import FigureCanvasBase

        known = ["", *(f".{name}" for name in FigureCanvasBase.filetypes)]
        if args.output.suffix.lower() not in known:
            parser.error(f"--output {args.output}: no ending of {' '.join(known[1:])}")
    return args


def parse_drafting(text: str) -> tuple[int, int]:
    layers, tokens = map(int, text.split(","))
    if layers < 1 or tokens < 1:
        raise argparse.ArgumentTypeError(f"{text}: both must be at least 1")
    return layers, tokens


def parse_shares(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))
