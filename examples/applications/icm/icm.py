# SPDX-License-Identifier: Apache-2.0
"""Labels a pool of examples without any true label, by Internal Coherence
Maximization (search.py), with the model that a server serves.

    .venv/bin/vllm serve --config examples/applications/icm/configs/reference.yaml
    .venv/bin/python examples/applications/icm/icm.py --testbed vllm-types

Stop it with Ctrl-C at any time; the same command goes on where it stopped.
"""

import itertools
import json
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from common import ClientError, Journal, JournalError
from common.program import any_terminal, interruptible, options_named
from prompts import Prompt, Prompts, Usage, in_one_order
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from record import Record, restore
from rich.table import Table
from scorer import TOP_LOGPROBS, Scorer
from search import (
    Consistency,
    Example,
    Labels,
    Parameters,
    Search,
    State,
    Step,
    agreement,
)
from testbeds import Sample, Testbed, TestbedError, load

SAMPLED_TOGETHER = 16  # prompts
JOURNAL = "journal.jsonl"
ADVICE = "Choose another --output, or throw it away with --restart."
console = Console()


class Settings(BaseSettings):
    """Label a pool of examples by Internal Coherence Maximization. Each option can
    also be an environment variable: ICM_BASE_URL, ICM_API_KEY, ..."""

    model_config = SettingsConfigDict(
        env_prefix="ICM_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_prog_name="icm.py",
        cli_hide_none_type=True,
        extra="forbid",
    )

    testbed: str = Field(
        "vllm-types", description="truthfulQA, gsm8k, alpaca, vllm-types or a FILE"
    )
    dataset: str | None = Field(
        None, description="where the testbed's data set is, if not on the hub"
    )
    pool_size: int = Field(256, ge=2, description="examples to label")
    iterations: int = Field(1500, ge=0, description="of the search, in all")
    base_url: str = Field("http://localhost:8000", description="of the server")
    model: str | None = Field(None, description="served name; default: the only one")
    api_key: SecretStr = Field(SecretStr("EMPTY"), description="for other servers")
    requests_per_minute: float | None = Field(
        None, gt=0, description="default: no limit for our own servers, 60 for others"
    )
    top_logprobs: int = Field(
        TOP_LOGPROBS, ge=1, description="asked of servers that do not score by name"
    )
    timeout: float = Field(
        600,
        gt=0,
        allow_inf_nan=False,
        description="seconds to wait for a whole answer",
    )
    patience: float = Field(
        600, ge=0, description="seconds to try again while a server fails"
    )
    max_demonstrations: int | None = Field(
        None, ge=1, description="default: as many as fit the model's context"
    )
    alpha: float = Field(50, ge=0, description="weight of mutual predictability")
    initial_temperature: float = Field(10, gt=0)
    final_temperature: float = Field(0.01, gt=0)
    cooling: float = Field(0.99, ge=0, description="beta of the schedule")
    seeds: int = Field(8, ge=1, description="examples labelled at random at first")
    fix_rounds: int = Field(10, ge=0, description="of a consistency fix, at most")
    seed: int = Field(0, description="of all random choices")
    output: Path = Field(
        Path(__file__).parents[3] / "build" / "icm",
        description="folder of journal and report",
    )
    restart: bool = Field(
        False, description="throw away the journal there; without it a run goes on"
    )
    compare: int = Field(
        0, ge=0, description="afterwards, time one call against N so many times"
    )

    def parameters(self) -> Parameters:
        names = Parameters.__dataclass_fields__
        return Parameters(**{n: getattr(self, n) for n in names if hasattr(self, n)})

    def cli_cmd(self) -> None:
        logging.basicConfig(
            level="WARNING",
            format="%(message)s",
            handlers=[RichHandler(console=console, show_path=False)],
        )
        goes_on = f"Nothing is lost: {self.same_command()} goes on."
        try:
            with interruptible(goes_on):
                run(self)
        except (ClientError, JournalError, TestbedError, OSError) as error:
            name = f"[red]{type(error).__name__}[/]:"
            console.print(name, escape(str(error)), highlight=False)
            journal = self.output / JOURNAL
            if isinstance(error, ClientError) and journal.stat().st_size:
                console.print(f"Nothing is lost: {self.output} has all iterations so "
                              f"far, and {self.same_command()} goes on.",
                              markup=False)  # fmt: skip
            sys.exit(1)

    def same_command(self) -> str:
        return "the same command" + (" without --restart" if self.restart else "")


def run(settings: Settings) -> dict:
    """Searches, from the journal if there is one, and reports."""
    path = settings.output / JOURNAL
    with Journal(path, ADVICE) as journal, connect(settings) as client:
        testbed = load(
            settings.testbed,
            settings.dataset,
            settings.pool_size,
            settings.seed,
            sample_once(settings, client, journal),
        )
        examples = testbed.pool(settings.pool_size, settings.seed)
        prompts = Prompts(
            client,
            examples,
            testbed.labels,
            testbed.header,
            testbed.separator,
            settings.max_demonstrations,
        )
        describe(testbed, examples, prompts, client)
        search = Search(
            examples,
            Consistency(examples, testbed.rule),
            len(testbed.labels),
            prompts.evaluate,
            settings.parameters(),
        )
        lines = journal.begin(
            identity(settings, testbed, examples, prompts), restart=settings.restart
        )
        state, zero_shot, usage, seconds = anneal(
            search, prompts, journal, lines, settings.iterations, settings.seed
        )
        report = summarize(
            settings, testbed, examples, prompts, state, zero_shot, usage, seconds
        )
        if settings.compare:
            report["compare"] = compare(prompts, state.labels, settings)
        write(settings.output, testbed, examples, state, report)
    show(report, settings.output)
    return report


def connect(settings: Settings) -> Scorer:
    with options_named():
        return Scorer(
            settings.base_url,
            settings.model,
            api_key=settings.api_key.get_secret_value(),
            timeout=settings.timeout,
            patience=settings.patience,
            requests_per_minute=settings.requests_per_minute,
            top_logprobs=settings.top_logprobs,
        )


def sample_once(settings: Settings, client: Scorer, journal: Journal) -> Sample:
    """`Scorer.sample`, a few prompts at a time, which keeps the answers: a second time
    they would differ."""

    def sample(prompts: Sequence[str], **fields) -> list[list[str]]:
        parts = range(0, len(prompts), SAMPLED_TOGETHER)
        texts = (part(prompts[n : n + SAMPLED_TOGETHER], fields) for n in parts)
        return [*itertools.chain.from_iterable(texts)]

    def part(prompts: Sequence[str], fields: dict) -> list[list[str]]:
        request = json.dumps([client.root, prompts, fields], sort_keys=True)
        name = sha256(request.encode()).hexdigest()[:16]
        kept = settings.output / f"sampled-{name}.json"
        if not kept.exists() or settings.restart:
            if settings.restart:
                # It is of the solutions that go. What follows may be interrupted.
                journal.clear()
            with console.status(f"sampling solutions ({kept.name})"):
                replace_file(kept, json.dumps(client.sample(prompts, **fields)))
        return json.loads(kept.read_text())

    return sample


def replace_file(path: Path, text: str) -> None:
    """Puts a file in place of another at once: whoever reads finds one of the two."""
    temporary = path.with_suffix(".new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def identity(
    settings: Settings, testbed: Testbed, examples: list[Example], prompts: Prompts
) -> dict:
    def fingerprint(text: str) -> str:
        return sha256(text.encode()).hexdigest()

    client = prompts.client
    return {
        "testbed": settings.testbed,
        "content of the testbed": fingerprint(testbed.model_dump_json()),
        "pool": fingerprint(json.dumps(examples)),
        "model": client.model,
        "folder or hub name of the model": client.root,
        "scores": "by name" if client.scores_by_name else f"top {client.top}",
        "demonstrations": prompts.slots,
        "seed": settings.seed,
        **asdict(settings.parameters()),
    }


def anneal(
    search: Search,
    prompts: Prompts,
    journal: Journal,
    lines: list[dict],
    iterations: int,
    seed: int,
) -> tuple[State, np.ndarray, list[Usage], float]:
    """Runs the iterations that are left, and writes each to the journal.

    Args:
        lines: that the journal has.

    Returns:
        The last state, the zero-shot scores, what each iteration cost, and the
        seconds that all of them took.
    """
    if lines:
        state, zero_shot, usage, seconds, record = restore(journal, lines)
        console.print(f"Going on after iteration {state.iteration}.")
    else:
        try:
            with console.status("Zero-shot labels and the first random ones"):
                zero_shot = prompts.score(prompts.zero_shot())
                refuse_unlisted(prompts)
                state = search.start(seed)
        except BaseException:
            journal.clear()  # nothing was done: another run may have the folder
            raise
        usage, seconds, record = [], 0.0, Record(journal)
        record.begin(state, zero_shot)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "Searching", total=iterations, completed=min(state.iteration, iterations)
        )
        while state.iteration < iterations:
            begin = time.perf_counter()
            prompts.usage = Usage()
            prompts.remember(state.labels, state.scores)
            state = search.step(state)
            usage.append(prompts.usage)
            seconds += time.perf_counter() - begin
            record.iteration(state, prompts.usage, seconds)
            step = state.history[-1]
            objective = f"U = {step.objective:.3f}, {step.labelled} labelled"
            progress.update(task, advance=1, description=objective)
    return state, zero_shot, usage, seconds


def refuse_unlisted(prompts: Prompts) -> None:
    """To be called after the zero-shot request, before any other.

    Raises:
        ClientError: a label is in no prompt's top log-probabilities.
    """
    for label, times in prompts.client.unlisted.items():
        if times == len(prompts.texts):
            raise ClientError(
                f"The label {label!r} is among the top {prompts.client.top} "
                "log-probabilities of not one example. Is it a single token of "
                f"{prompts.client.model}? With most tokenizers a space in front helps; "
                "so may a higher --top-logprobs, where the server allows it."
            )


# The report


def describe(
    testbed: Testbed, examples: list, prompts: Prompts, client: Scorer
) -> None:
    how = "by name" if client.scores_by_name else "from top log-probabilities"
    console.print(
        f"{testbed.description or 'Testbed'}\n"
        f"{len(examples)} examples, labels {testbed.labels}, rule {testbed.rule}; "
        f"{client.model} at {client.url}, labels scored {how}",
        highlight=False,
        markup=False,
    )
    if prompts.slots < len(examples):
        console.print(
            f"Only the first {prompts.slots} of the pool serve as demonstrations, by "
            "the model's context or --max-demonstrations; all are labelled.",
            highlight=False,
        )


def summarize(
    settings: Settings,
    testbed: Testbed,
    examples: list[Example],
    prompts: Prompts,
    state: State,
    zero_shot: np.ndarray,
    usage: list[Usage],
    seconds: float,
) -> dict:
    """All numbers of the report. Two more calls, where the truth is known, say what
    demonstrations do for this model at all: with true labels and with random ones."""
    truth = {i: e.truth for i, e in enumerate(examples) if e.truth is not None}
    first = most_likely(zero_shot)
    accuracy = {
        "ICM": agreement(state.labels, examples),
        "zero-shot, the same ones": agreement(
            {i: first[i] for i in state.labels}, examples
        ),
        "zero-shot": agreement(first, examples),
    }
    if truth:
        accuracy["one label for all"] = max(Counter(truth.values()).values()) / len(
            truth
        )
        count = len(testbed.labels)
        rng = random.Random(settings.seed)
        drawn = {i: rng.randrange(count) for i in truth}
        for name, labels in {
            "demonstrations with true labels": truth,
            "demonstrations with random labels": drawn,
        }.items():
            (scores,) = prompts.evaluate([labels])
            accuracy[name] = agreement(most_likely(scores), examples)
    last = state.history[-1] if state.history else None
    return {
        "testbed": settings.testbed,
        "model": prompts.client.model,
        "examples": len(examples),
        "demonstrations": prompts.slots,
        "labelled": len(state.labels),
        "accuracy": accuracy,
        "iterations": state.iteration,
        "proposals": sum(step.proposed for step in state.history),
        "accepted": sum(step.accepted for step in state.history),
        "seconds": seconds,
        "iterations_per_minute": 60 * state.iteration / seconds if seconds else None,
        "usage": sum(usage, Usage())._asdict(),
        "cache": {
            name: {
                "calls": part.calls,
                "hit_rate": part.hit_rate(),
                "demonstration_hit_rate": part.demonstration_hit_rate(),
            }
            for name, part in parts(
                usage, state.history, settings.seeds, prompts.slots
            ).items()
        },
        "retries": prompts.client.retries,
        "missing_labels": prompts.client.unlisted.total(),
        "objective": last and last.objective,
        "inconsistent": last and last.inconsistent,
    }


def parts(
    usage: list[Usage], history: Sequence[Step], seeds: int, slots: int
) -> dict[str, Usage]:
    """What the iterations cost, in all; after warm-up, which is over when half of the
    demonstrations' slots are labelled; and, of these, where the example was not
    labelled yet and where it was."""
    whole = warm = new = old = Usage()
    labelled = set(range(seeds))
    for cost, step in zip(usage, history, strict=True):
        whole += cost
        if 2 * sum(slot < slots for slot in labelled) >= slots:
            warm += cost
            if step.example in labelled:
                old += cost
            else:
                new += cost
        if step.accepted:
            labelled.add(step.example)
    return {
        "all iterations": whole,
        "after warm-up": warm,
        "- a new label": new,
        "- another label": old,
    }


def most_likely(scores: np.ndarray) -> Labels:
    return dict(enumerate(scores.argmax(1).tolist()))


def compare(prompts: Prompts, labels: Labels, settings: Settings) -> dict | None:
    """Times what an iteration asks: all prompts of a labelling with one demonstration
    changed, each time another one. [repeats] seconds for each way, by turns; before
    each, untimed, the same way asks about the labelling itself, so that each finds
    what it left in the cache and nothing of the others' is in its way.

    In one call; in a call a prompt, one after the other and many under way at once;
    and as one does it without this program and fork: a call a prompt, demonstrations
    in one order less the one, the top log-probabilities of a generated token.

    Returns:
        None if there are fewer demonstrations than ways.
    """
    client = prompts.client

    def one_by_one(changed: Labels) -> None:
        for prompt in prompts.of(changed):
            client.score([prompt.whole], prompts.labels)

    def at_once(changed: Labels) -> None:
        def score(prompt: Prompt) -> None:
            client.score([prompt.whole], prompts.labels)

        list(pool.map(score, prompts.of(changed)))

    def usual(changed: Labels) -> None:
        for prompt in prompts.of(changed, leave_one_out=in_one_order):
            client.top_logprobs(prompt.whole)

    ways = {
        "one call": lambda changed: prompts.score(prompts.of(changed)),
        "N calls": one_by_one,
        "N calls, 32 at once": at_once,
        "N calls, one order, top log-probs": usual,
    }
    rng = random.Random(settings.seed)
    members = [slot for slot in labels if slot < prompts.slots]
    repeats = min(settings.compare, len(members) // len(ways))
    if repeats < settings.compare:
        console.print(f"--compare: {len(members)} demonstrations, each changed once, "
                      f"are enough for {repeats} times.")  # fmt: skip
    if not repeats:
        return None
    slots = iter(rng.sample(members, repeats * len(ways)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    calls: dict[str, int] = {}
    with ThreadPoolExecutor(32) as pool, console.status("Comparing"):
        for _ in range(repeats):
            for name, score in ways.items():
                score(labels)
                slot = next(slots)
                changed = {**labels, slot: (labels[slot] + 1) % len(prompts.labels)}
                before = client.calls
                begin = time.perf_counter()
                score(changed)
                seconds[name].append(time.perf_counter() - begin)
                calls[name] = client.calls - before
    return {"prompts": len(prompts.texts), "seconds": seconds, "calls": calls}


def write(
    folder: Path,
    testbed: Testbed,
    examples: list[Example],
    state: State,
    report: dict,
) -> None:
    """Leaves report.json, labels.jsonl and objective.png."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    with (folder / "labels.jsonl").open("w") as file:
        for i, (example, scores) in enumerate(zip(examples, state.scores, strict=True)):
            name = testbed.labels[state.labels[i]] if i in state.labels else None
            row = {"text": example.text, "label": name, "logprobs": scores.tolist()}
            file.write(json.dumps(row) + "\n")
    if state.history:
        plot(state.history, report["accuracy"]["zero-shot"], folder / "objective.png")


def plot(history: tuple[Step, ...], zero_shot: float | None, file: Path) -> None:
    """The objective, and below it the agreement with the truth, over iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    iterations = [step.iteration for step in history]
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 5))
    above.plot(iterations, [step.objective for step in history])
    above.set_ylabel("objective U")
    count = below.twinx()
    count.plot(iterations, [step.labelled for step in history], color="lightgray")
    count.set_ylabel("labelled examples", color="gray")
    if zero_shot is not None:
        below.plot(iterations, [step.agreement for step in history], label="ICM")
        below.axhline(zero_shot, linestyle="--", color="black", label="zero-shot")
        below.legend()
        below.set_ylabel("accuracy of the labelled")
    below.set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def show(report: dict, folder: Path) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("labels by")
    table.add_column("accuracy", justify="right")
    for name, accuracy in report["accuracy"].items():
        table.add_row(name, "unknown" if accuracy is None else f"{accuracy:.3f}")
    console.print(table)
    usage = report["usage"]
    lines = [
        (
            f"{report['labelled']} of {report['examples']} labelled in "
            f"{report['iterations']} iterations; {report['proposals']} changed a label, "
            f"{report['accepted']} of these accepted"
        ),
        f"{usage['calls']} calls, {usage['prompts']} prompts; "
        f"{report['retries']} retries since the last start",
    ]
    if report["iterations_per_minute"]:
        lines.append(
            f"{report['iterations_per_minute']:.0f} iterations a minute, "
            f"{60 * usage['calls'] / report['seconds']:.0f} calls a minute"
        )
    if report["missing_labels"]:
        lines.append(f"{report['missing_labels']} labels were not among the top tokens")
    if report["objective"] is not None:
        lines.append(
            f"U = {report['objective']:.3f}, {report['inconsistent']} contradictions"
        )
    console.print("\n".join(lines), highlight=False)
    if usage["tokens"]:
        console.print(cache_table(report["cache"]))
    if report.get("compare"):
        console.print(comparison(report["compare"]))
    plotted = ", objective.png" * bool(report["iterations"])
    console.print(f"labels.jsonl, report.json{plotted} are in {folder}")


def new_table(title: str, *columns: str) -> Table:
    """Rows begin with a name; what follows in the columns is on the right."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def cache_table(cache: dict) -> Table:
    columns = "calls", "of the prompts", "of the demonstrations"
    table = new_table("tokens from the prefix cache", *columns)
    for name, part in cache.items():
        if part["hit_rate"] is not None:
            table.add_row(
                name,
                str(part["calls"]),
                f"{part['hit_rate']:.2%}",
                f"≥ {part['demonstration_hit_rate']:.2%}",
            )
    return table


def comparison(result: dict) -> Table:
    title = f"{result['prompts']} prompts, one demonstration changed"
    table = new_table(title, "calls", "seconds", "ratio")
    first = statistics.median(result["seconds"]["one call"])
    for name, seconds in result["seconds"].items():
        half = (max(seconds) - min(seconds)) / 2
        table.add_row(
            name,
            str(result["calls"][name]),
            f"{statistics.median(seconds):.2f} ±{half:.2f}",
            f"{statistics.median(seconds) / first:.2f}×",
        )
    return table


def main(argv: list[str] | None = None) -> None:
    any_terminal()
    try:
        CliApp.run(Settings, cli_args=sys.argv[1:] if argv is None else argv)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"])).replace("_", "-")
            print(f"icm.py: error: --{name}: {problem['msg']}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
