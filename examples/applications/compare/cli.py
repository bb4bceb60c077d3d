# SPDX-License-Identifier: Apache-2.0
"""The command line: imports what it takes to read it, and no more."""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = """How bad is this quantization? Compares models with a reference, by
exact scores of named tokens in vLLM: perplexity and its paired ratio, KL divergence,
agreement, the change of the right token's probability, each beside its noise floor."""
EXAMPLES = """examples:
  compare run plan.yaml --output build/compare/out
  compare run --reference MODEL --candidate W4A16 --candidate W8A8,dtype=bfloat16 \\
      --text README.md --option enforce_eager=true --output build/compare/out
  compare quantize --scheme W4A16 --group-size 32 --output build/compare/W4A16
"""
MODEL = "PATH[,KEY=VALUE...]"
TEXTS = ("text", "held_out", "dataset", "dataset_config", "num_samples", "limit_tokens")
GIVEN = ("context_length", "stride", "top_k", "tail_samples", "noise_dtype")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["worker"]:  # a process of the program's own
        from compare.worker import main as work

        work(argparse.Namespace(pipe=int(argv[1]), parent=int(argv[2])))
        return
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a locale that is not UTF-8
        sys.stdout.reconfigure(errors="replace")
    parser = new_parser()
    args = parser.parse_args(argv)
    args.run(args.parser, args)


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="score what is missing, and report")
    report = commands.add_parser("report", help="report what was scored")
    for command, function in ((run, run_run), (report, run_report)):
        add_plan_arguments(command)
        command.set_defaults(run=function, parser=command)
    run.add_argument("--restart", action="store_true",
                     help="forget what --output holds of an earlier run")  # fmt: skip
    from compare import quantize

    make = commands.add_parser(
        "quantize", help="make a compressed-tensors checkpoint",
        description=quantize.__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    quantize.add_arguments(make)
    make.set_defaults(run=run_quantize, parser=make)
    bench = commands.add_parser("bench", help="time and bytes, beside two other ways")
    bench.add_argument("folder", type=Path, metavar="OUTPUT",
                       help="of a run: its reference and its first windows")  # fmt: skip
    bench.add_argument("--candidate", action="append", default=[], metavar="PATH",
                       help="default: all of the run")  # fmt: skip
    bench.add_argument("--positions", type=int, default=2000)
    bench.add_argument("--full-positions", type=int, default=32, metavar="N",
                       help="of the full vocabulary: an object a word")  # fmt: skip
    bench.add_argument("--repeat", type=int, default=3)
    bench.set_defaults(run=run_bench, parser=bench)
    return parser


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", type=Path, metavar="PLAN.yaml",
                        help="what to compare; options beside it prevail")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER",
                        help="what is scored and reported; a run goes on there")  # fmt: skip
    models = parser.add_argument_group("models")
    models.add_argument("--reference", metavar=MODEL,
                        help="keys: name, dtype, quantization, tensor_parallel_size, "
                        "size_on_disk, options.NAME of vLLM")  # fmt: skip
    models.add_argument("--candidate", action="append", default=[], metavar=MODEL,
                        dest="candidates")  # fmt: skip
    models.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="an engine argument of vLLM for all models")  # fmt: skip
    from compare.texts import add_text_arguments

    add_text_arguments(parser, required=False)
    parser.set_defaults(dataset_split=None, text_column=None)
    scores = parser.add_argument_group("what is scored")
    scores.add_argument("--context-length", type=int, help="tokens of a window (512)")
    scores.add_argument("--stride", type=int, help="default: half the context")
    scores.add_argument("--top-k", type=int, metavar="K",
                        help="candidates a position (64)")  # fmt: skip
    scores.add_argument("--tail-samples", type=int, metavar="M",
                        help="tail tokens a position for the estimate (16)")  # fmt: skip
    scores.add_argument("--no-noise-floor", action="store_true",
                        help="do not score the reference against itself")  # fmt: skip
    scores.add_argument("--noise-dtype", help="of the reference for the noise floor "
                        "(bfloat16 for float32, else the other half precision, or float32 "
                        "for models that vLLM refuses in float16)")  # fmt: skip


def read_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    """The checked plan, of the YAML file and the options; or a parser error."""
    from compare.plan import PlanError, make_plan, read_yaml

    try:
        content = read_yaml(args.plan) if args.plan else {}
        source = str(args.plan) if args.plan else "command line"
        return make_plan(merge(content, args), source)
    except PlanError as error:
        parser.error(str(error))


def merge(content: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The file's content with the options over it."""
    from compare.plan import PlanError, checked_defaults, parse_model, parse_value

    for name in GIVEN:
        if getattr(args, name) is not None:
            content[name] = getattr(args, name)
    if args.no_noise_floor:
        content["noise_floor"] = False
    if args.reference:
        content["reference"] = parse_model(args.reference)
    if args.candidates:
        content["candidates"] = [parse_model(text) for text in args.candidates]
    names = (*TEXTS, "dataset_split", "text_column")
    texts = {n: v for n in names if (v := getattr(args, n)) is not None}
    if texts:
        named = any(n in texts for n in ("text", "held_out", "dataset"))
        of_file = content.get("texts")
        beside = of_file if isinstance(of_file, dict) and not named else {}
        content["texts"] = beside | texts
    options = {}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--option {text}: NAME=VALUE is wanted")
        options[name] = parse_value(value)
    if options:
        defaults = checked_defaults(content)
        beside = defaults.get("options") or {}
        content["defaults"] = defaults | {"options": beside | options}
    return content


def run_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    plan = read_plan(parser, args)
    from compare.plan import PlanError, check_texts
    from compare.reference import Refused
    from compare.report import write_report
    from compare.run import EngineError, run
    from compare.store import Store

    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output: {args.output} is no folder")
    check_output(parser, args.output)
    try:
        check_texts(plan.texts)
        store = Store(args.output)
        with store.locked() as lock:
            if args.restart:
                store.clear()
            store.open_for(plan)
            failed = run(plan, store, lock)
            write_report(plan, store, failed)
    except PlanError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on in {args.output}")
    except EngineError as error:
        sys.exit(f"error: {plan.reference.label}: {error}")
    except Refused as error:
        sys.exit(f"error: {error}; without that file, the same command makes it again")
    if failed:
        sys.exit(f"error: {', '.join(row['model'] for row in failed)} failed")


def check_output(parser: argparse.ArgumentParser, folder: Path) -> None:
    """A parser error if the folder holds something else, which `--restart` would remove
    if it has one of the names that are used here."""
    if not folder.exists() or (folder / "comparison.json").exists():
        return
    for path in folder.iterdir():
        is_empty = path.is_dir() and not any(path.iterdir())
        if path.name != ".lock" and not is_empty:
            parser.error(f"--output: {folder} is not empty, and holds no comparison")


def run_report(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    plan = read_plan(parser, args)
    from compare.plan import PlanError
    from compare.reference import Refused
    from compare.report import write_report
    from compare.store import Store

    if not (args.output / "comparison.json").exists():
        parser.error(f"--output: {args.output} holds no comparison")
    store = Store(args.output)
    try:
        store.open_for(plan)
        if not store.complete:
            parser.error(f"--output: the reference in {args.output} is not complete")
        write_report(plan, store, [])
    except PlanError as error:
        parser.error(str(error))
    except Refused as error:
        sys.exit(f"error: {error}")


def run_quantize(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from compare import quantize

    quantize.check(parser, args)
    try:
        quantize.run(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def run_bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not (args.folder / "report.json").exists():
        parser.error(f"{args.folder} holds no finished run")
    for name in ("positions", "full_positions", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    from compare import bench

    bench.run(args)
