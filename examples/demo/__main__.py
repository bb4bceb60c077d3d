# SPDX-License-Identifier: Apache-2.0
"""What this fork does, against upstream's own way in the same wheel, in 90 seconds.

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
import memory
import process
from common import quiet
from rich.console import Console
from rows import Row, show

GIB = 2**30
MEMORY = 6 * GIB
DISK = 2 * GIB
LOGS = files.ROOT / "build" / "logs"

NEXT = """\
What to try next
  .venv/bin/python examples/score_perplexity.py --text README.md --enforce-eager
  .venv/bin/python examples/lm_eval/run.py --help     lm-eval's command line, faster
  .venv/bin/vllm serve examples/reference_model/model --enforce-eager \\
      --kv-cache-memory-bytes 1073741824              then README.md's requests
  ./build.sh test"""

NOTES = [
    f"Model: the reference model (10.5 M parameters), padded with zeros to {files.TIMES} "
    f"times its width and a vocabulary of {files.VOCABULARY:,}; the same function, the "
    "cost of a wide model (examples/reference_model/inflate.py). bfloat16, eager.",
    "Ratios are of the two ways in this run, by turns: median, least and greatest.",
    "Experimental: exiting early changes what a model says; models trained for it "
    "lose least. benchmarks/README.md has the whole trade-off.",
]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    quiet.hush(in_process=True)
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
    with line(console, "1/6 loading vLLM, padding the reference model"):
        (made,) = server.run("files", archive)
    scoring = server.run("scoring", made)
    with line(console, "2/6 perplexity"):
        rows = [next(scoring), next(scoring)]
    with line(console, "3/6 answers on one shared context"):
        rows.append(next(scoring))
    with line(console, "4/6 multiple choice"):
        rows += scoring
    with line(console, "5/6 peak memory"):
        ways = [server.run("memory", made, upstream) for upstream in (True, False)]
        rows.append(memory_row(*(next(way) for way in ways)))
    with line(console, "6/6 decoding by depth"):
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


def memory_row(upstream: memory.Peak, fork: memory.Peak) -> Row:
    return Row(
        f"Peak memory of scoring {memory.LENGTH - 1:,} tokens, above that of prefill",
        f"prompt_logprobs=0\n{upstream.above:,.0f} MiB",
        f"target_token_ids\n{fork.above:,.0f} MiB",
        [upstream.above / fork.above],
        "less",
        f"perplexity {upstream.perplexity:.1f} and {fork.perplexity:.1f}",
    )


if __name__ == "__main__":
    main()
