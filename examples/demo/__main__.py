# SPDX-License-Identifier: Apache-2.0
"""What this fork does, against upstream's own way in the same wheel, in about three minutes.

    .venv/bin/python examples/demo

Every figure is measured while you wait. Each job is done twice by the same engine: the
way vLLM 0.32 has for it and the way this fork adds; the two take turns. The model is the
reference model, padded to a realistic width (examples/reference_model/inflate.py).
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import files
import process
from common import quiet
from common.program import any_terminal
from rich.console import Console
from rows import Row, show

GIB = 2**30
MEMORY = 6 * GIB
DISK = 2 * GIB
LOGS = files.ROOT / "build" / "logs"

NEXT = """\
What to try next
  # perplexity of a text of yours
  .venv/bin/python examples/score_perplexity.py --text README.md --enforce-eager
  # lm-eval's command line on this fork
  .venv/bin/python examples/lm_eval/run.py --help
  # a server that scores; docs/use.md has requests for it
  .venv/bin/vllm serve examples/reference_model/model --served-model-name reference \\
      --enforce-eager --kv-cache-memory-bytes 1073741824
  # depth routing on a text of yours: docs/features/utio.md
  # all the figures, and how they were taken: benchmarks/README.md
  ./build.sh test --quick"""

NOTES = [
    "Measured now, the two ways by turns: median, least and greatest. Both ways are "
    "of this wheel.",
    f"Model: the reference model, padded with zeros to {files.TIMES} times its width and "
    f"{files.VOCABULARY:,} words; it computes the same and costs what a wide model costs. "
    "Half of that is the head, more than in most models, so perplexity gains more here "
    "than elsewhere. For depth it keeps its own 4,096 words. bfloat16, eager.",
    "Depth routing is experimental: it changes what a model says.",
]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    quiet.hush(in_process=True)
    any_terminal()
    try:
        check_machine()
        demo(Console())
    except (OSError, process.PartFailed) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def check_machine() -> None:
    """
    Raises:
        OSError: there is too little memory or disk.
    """
    free = process.available_memory()
    if free < MEMORY:
        raise OSError(
            f"the demo needs {MEMORY / GIB:.0f} GiB of free memory, here are "
            f"{free / GIB:.1f}: close something, or try the small model alone with "
            "examples/score_perplexity.py"
        )
    if shutil.disk_usage(files.ROOT).free < DISK:
        raise OSError(f"the demo needs {DISK / GIB:.0f} GiB of free disk in build/")


def demo(console: Console) -> None:
    begin = time.monotonic()
    archive = files.find_archive()
    server = process.Server(LOGS)
    with line(console, "1/5 loading vLLM, padding the reference model"):
        (made,) = server.run("files", archive)
    rows: list[Row] = []
    scoring = server.run("scoring", made)
    with line(console, "2/5 perplexity, its time and its memory"):
        rows += next(scoring)
    with line(console, "3/5 answers to one context"):
        rows += next(scoring)
    with line(console, "4/5 multiple choice"):
        for more in scoring:
            rows += more
    with line(console, "5/5 decoding by depth"):
        rows += server.run("depth", made)
    show(rows, NOTES, console)
    console.print(f"{time.monotonic() - begin:.0f} seconds in all\n", highlight=False)
    console.print(NEXT, highlight=False)


@contextmanager
def line(console: Console, title: str) -> Iterator[None]:
    """One line of progress: what is done, and how long it took."""
    begin = time.monotonic()
    console.print(f"{title} ...", end="", highlight=False)
    try:
        yield
    except BaseException:
        console.print()
        raise
    console.print(f" {time.monotonic() - begin:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
