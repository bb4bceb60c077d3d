# SPDX-License-Identifier: Apache-2.0
"""A playbook that a model writes for itself.

python examples/applications/ace run      improve a playbook over local samples
python examples/applications/ace bench    transformers and vLLM on the same prompts

`--help` after either shows its options.
"""

import json
import logging
import signal
import sys
from pathlib import Path

if not __package__:  # run as a folder
    sys.path[0:1] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from common import ClientError, Journal, JournalError, quiet
from common.program import any_terminal, interruptible
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from ace import bench
from ace.loop import PHASES, Loop, Report
from ace.playbook import Playbook, PlaybookError, replace_file
from ace.prompts import SampleError, load_samples
from ace.replies import Replies
from ace.settings import BenchSettings, RunSettings

console = Console(highlight=False)
if not console.is_terminal:
    console.width = 100
JOURNAL, PLAYBOOK, REPORT = "journal.jsonl", "playbook.json", "report.json"
ADVICE = "Choose another --output, or throw it away with --restart."


def run(settings: RunSettings) -> Report:
    """Runs the loop, from the journal if there is one, and reports."""
    samples = load_samples(settings.samples)
    start = settings.begin()
    folder = settings.output
    path = folder / JOURNAL
    with Journal(path, ADVICE) as journal, settings.connect() as client:
        # Not before the model is there: --restart throws away what was said.
        identity = client.identity | settings.identity(samples, start)
        replies = Replies(journal, identity, settings.restart)
        loop = Loop(client, samples, settings.options(), replies)
        console.print(
            f"{len(samples)} samples; {client.model} by {settings.provider}; "
            f"{len(replies)} completions are in {path}"
        )
        best = loop.run(start)
        best.save(folder / PLAYBOOK)
        report = loop.report
        replace_file(folder / REPORT, json.dumps(report.dump(), indent=1) + "\n")
        show(report, best, client.retries)
    console.print(f"{PLAYBOOK} (of round {report.best}) and {REPORT} are in {folder}")
    return report


def show(report: Report, best: Playbook, retries: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    splits = [*report.rounds[0].accuracy]
    for column in (
        "round",
        "bullets",
        *(f"{split} right" for split in splits),
        "no answer",
        "lessons",
        "changes",
        "no effect",
        "malformed",
    ):
        table.add_column(column, justify="right")
    for result in report.rounds:
        table.add_row(
            str(result.number),
            str(len(result.playbook.bullets)),
            *(f"{result.accuracy[split]:.1%}" for split in splits),
            str(result.unreadable),
            str(result.reflections),
            str(result.operations),
            str(result.without_effect),
            str(result.malformed),
        )
    console.print(table)
    if best.bullets:
        console.print(best.render(), markup=False)
    if report.stopped_early:
        console.print("Stopped early: the last rounds' playbooks were no better.")
    seconds = ", ".join(f"{phase} {report.seconds[phase]:.1f} s" for phase in PHASES)
    console.print(
        f"{report.asked} completions, {report.tokens} tokens ({seconds}); "
        f"{report.kept} were there already; {retries} retries"
    )


COMMANDS = {"run": (RunSettings, run), "bench": (BenchSettings, bench.run)}


def main(argv: list[str] | None = None) -> None:
    any_terminal()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]) or not argv or argv[0] not in COMMANDS:
        print(__doc__.strip())
        sys.exit(0 if argv[:1] in (["-h"], ["--help"]) else 2)
    logging.basicConfig(
        level="WARNING",
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    kind, command = COMMANDS[argv[0]]
    try:
        settings = CliApp.run(kind, cli_args=argv[1:])
        with interruptible(goes_on(settings) if argv[0] == "run" else ""):
            command(settings)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"])).replace("_", "-")
            print(f"error: --{name}: {problem['msg']}", file=sys.stderr)
        sys.exit(2)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (ClientError, JournalError, PlaybookError, SampleError, OSError) as error:
        console.print(f"[red]{type(error).__name__}[/]:", end=" ")
        console.print(str(error), markup=False)
        if argv[0] == "run" and isinstance(error, ClientError):
            console.print(goes_on(settings))
        sys.exit(1)


def goes_on(settings: RunSettings) -> str:
    how = " without --restart" if settings.restart else ""
    return f"Nothing is lost: the same command{how} goes on."


if __name__ == "__main__":
    quiet.hush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
