# SPDX-License-Identifier: Apache-2.0
"""The three phases with transformers and with vLLM: one model, prompts and machine.

The prompts of a phase are made from what vLLM said in the one before, so that all ways
are timed on the same prompts. vLLM's prefix cache is emptied before each measurement:
what it shares, it shares within the phase.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import psutil
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ace import prompts
from ace.client import Completion, Conversation, LLMClient, Sampling
from ace.loop import PHASES, Options, Phase, curations
from ace.playbook import read_operations, read_reflection, replace_file

if TYPE_CHECKING:
    from ace.settings import BenchSettings

TIE = 1e-3
"""Nats. Two float32 implementations of the reference model differ by up to 2e-4 in a
log-probability, so a gap below twice that, and some more, can turn round."""
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 100

Work = dict[Phase, list[Conversation]]


class Times(NamedTuple):
    """Each `[repeats]`, in seconds."""

    wall: list[float]
    processor: list[float]  # of this process and those that it started


VLLM, ONE = "vLLM", "transformers, one by one"


@dataclass
class Difference:
    """Where two greedy outputs part."""

    phase: Phase
    index: int
    position: int  # tokens that are equal before
    ours: int | None  # vLLM's token; None: it ended
    theirs: int | None
    our_gap: float | None  # nats between vLLM's two likeliest tokens there
    their_gap: float | None

    @property
    def is_tie(self) -> bool:
        gaps = [gap for gap in (self.our_gap, self.their_gap) if gap is not None]
        return bool(gaps) and max(gaps) < TIE


def run(settings: "BenchSettings") -> dict:
    """Measures, prints and returns all figures."""
    samples = prompts.load_samples(settings.samples)
    samples = [s for s in samples if s.split == "train"][: settings.count]
    greedy = {"temperature": 0.0}
    sampling = {k: v.model_copy(update=greedy) for k, v in settings.sampling().items()}
    ways = {ONE: 1}
    if settings.batched > 1:
        ways[f"transformers, {settings.batched} at once"] = settings.batched
    seconds: dict[str, dict[str, Times]] = {}
    with settings.load("vllm") as client:
        work, said = make_work(client, samples, settings, sampling)
        fresh = client.engine.reset_prefix_cache
        seconds[VLLM], _ = measure(
            client, work, sampling, settings.repeats, VLLM, fresh
        )
        one_by_one = time_all(
            lambda: [
                client.chat([c], sampling["reflector"]) for c in work["reflector"]
            ],
            settings.repeats,
            "vLLM, reflector, one by one",
            fresh,
        )
        ours = top_two(client, work, sampling)
    for name, size in ways.items():
        with settings.load("transformers", batch_size=size) as client:
            seconds[name], found = measure(
                client, work, sampling, settings.repeats, name
            )
            if name == ONE:
                theirs = found
                for d in compare(ours, theirs):  # once more, for the gaps
                    asked = [work[d.phase][d.index]]
                    theirs[d.phase][d.index : d.index + 1] = client.chat(
                        asked, sampling[d.phase], top=2
                    )
    for results in seconds.values():
        results["total"] = total([*results.values()])
    differences = compare(ours, theirs)
    figures = {
        "samples": len(samples),
        "prompts": {phase: len(work[phase]) for phase in PHASES},
        "prompt_tokens": {
            phase: sum(len(c.prompt_token_ids) for c in said[phase]) for phase in PHASES
        },
        "generated_tokens": {
            phase: sum(len(c.token_ids) for c in said[phase]) for phase in PHASES
        },
        "seconds": {
            way: {phase: times._asdict() for phase, times in results.items()}
            for way, results in seconds.items()
        },
        "sequential_reflection": one_by_one._asdict(),
        "same_prompts": all(
            a.prompt_token_ids == b.prompt_token_ids
            for phase in PHASES
            for a, b in zip(ours[phase], theirs[phase], strict=True)
        ),
        "differences": [asdict(d) | {"tie": d.is_tie} for d in differences],
    }
    show(figures, ways, differences)
    if settings.output:
        replace_file(settings.output, json.dumps(figures, indent=1) + "\n")
    return figures


def make_work(
    client: LLMClient,
    samples: Sequence[prompts.Sample],
    settings: "BenchSettings",
    sampling: dict[Phase, Sampling],
) -> tuple[Work, dict[Phase, list[Completion]]]:
    """The prompts of a round, and what the client says to them."""
    playbook, prefill = settings.begin(), settings.prefill
    options = Options(lessons=settings.lessons, prefill=prefill, sampling=sampling)
    work: Work = {
        "generator": [prompts.generator(s, playbook, prefill) for s in samples]
    }
    said = {"generator": client.chat(work["generator"], sampling["generator"])}
    answers = [
        prompts.whole(asked, reply.text)
        for asked, reply in zip(work["generator"], said["generator"], strict=True)
    ]
    work["reflector"] = [
        prompts.reflector(s, text, prompts.judge(s, text), playbook, prefill)
        for s, text in zip(samples, answers, strict=True)
    ]
    said["reflector"] = client.chat(work["reflector"], sampling["reflector"])
    read = [
        read_reflection(prompts.whole(asked, reply.text))
        for asked, reply in zip(work["reflector"], said["reflector"], strict=True)
    ]
    work["curator"] = curations([r for r in read if r], playbook, options)
    said["curator"] = client.chat(work["curator"], sampling["curator"])
    for asked, reply in zip(work["curator"], said["curator"], strict=True):
        playbook.apply(read_operations(prompts.whole(asked, reply.text))[0])
    return work, said


def measure(
    client: LLMClient,
    work: Work,
    sampling: dict[Phase, Sampling],
    repeats: int,
    name: str,
    fresh: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Times], dict[Phase, list[Completion]]]:
    """What each phase takes as one batch, and what was said."""
    said = {}

    def ask(phase: Phase) -> None:
        said[phase] = client.chat(work[phase], sampling[phase])

    client.chat(work["generator"][:2], sampling["generator"])  # warms up
    times = {
        phase: time_all(
            lambda phase=phase: ask(phase), repeats, f"{name}, {phase}", fresh
        )
        for phase in PHASES
    }
    return times, said


def time_all(
    call: Callable[[], object], repeats: int, name: str, fresh: Callable[[], object]
) -> Times:
    times = Times([], [])
    for _ in tqdm(range(repeats), desc=name):
        fresh()
        begin, processor = time.perf_counter(), processor_seconds()
        call()
        times.wall.append(time.perf_counter() - begin)
        times.processor.append(processor_seconds() - processor)
    return times


def processor_seconds() -> float:
    """Of this process and those that it started, since they began."""
    this = psutil.Process()
    used = [p.cpu_times() for p in (this, *this.children(recursive=True))]
    return sum(times.user + times.system for times in used)


def total(phases: Sequence[Times]) -> Times:
    """Of all phases, repeat by repeat."""
    return Times(*([sum(repeat) for repeat in zip(*kind)] for kind in zip(*phases)))


def top_two(
    client: LLMClient, work: Work, sampling: dict[Phase, Sampling]
) -> dict[Phase, list[Completion]]:
    """What is said, with the two likeliest tokens of each position."""
    return {p: client.chat(work[p], sampling[p], top=2) for p in PHASES}


def compare(
    ours: dict[Phase, list[Completion]], theirs: dict[Phase, list[Completion]]
) -> list[Difference]:
    """Where outputs to the same prompts part, of those that do."""
    found = []
    for phase in PHASES:
        for index, pair in enumerate(zip(ours[phase], theirs[phase], strict=True)):
            position = first_difference(*(c.token_ids for c in pair))
            if position is None:
                continue
            tokens = [
                c.token_ids[position] if position < len(c.token_ids) else None
                for c in pair
            ]
            gaps = [gap(c, position) for c in pair]
            found.append(Difference(phase, index, position, *tokens, *gaps))
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position where two lists are not the same; None if there is none."""
    for position, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def gap(completion: Completion, position: int) -> float | None:
    """Nats between the two likeliest tokens there."""
    if completion.top is None or position >= len(completion.top):
        return None
    first, second, *_ = sorted(completion.top[position].values(), reverse=True)
    return first - second


def show(figures: dict, ways: Iterable[str], differences: list[Difference]) -> None:
    for kind in Times._fields:
        console.print(phase_table(figures, ways, kind))
    table = new_table("Reflection with vLLM, seconds", "")
    for column in ("calls", *Times._fields, "ratio", "ratio, processor"):
        table.add_column(column, justify="right")
    batched = figures["seconds"][VLLM]["reflector"]
    sequential = figures["sequential_reflection"]
    for name, calls, times in (
        ("batched", 1, batched),
        ("sequential", figures["prompts"]["reflector"], sequential),
    ):
        table.add_row(
            name,
            str(calls),
            *(spread(times[kind]) for kind in Times._fields),
            *(ratio(times[kind], batched[kind]) for kind in Times._fields),
        )
    console.print(table)
    show_agreement(figures, differences)


def phase_table(figures: dict, ways: Iterable[str], kind: str) -> Table:
    seconds = figures["seconds"]
    short = [way.removeprefix("transformers, ") for way in ways]
    table = new_table(
        f"{figures['samples']} samples, {kind} seconds: transformers "
        f"{' and '.join(short)}, vLLM",
        "",
    )
    for column in ("prompts", "tokens in", "out", *short, VLLM):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(f"ratios to {VLLM}", justify="right", no_wrap=True)
    for phase in (*PHASES, "total"):
        counts = [
            str(figures[name].get(phase, sum(figures[name].values())))
            for name in ("prompts", "prompt_tokens", "generated_tokens")
        ]
        ours = seconds[VLLM][phase][kind]
        table.add_row(
            phase,
            *counts,
            *(spread(seconds[way][phase][kind]) for way in (*ways, VLLM)),
            ", ".join(ratio(seconds[way][phase][kind], ours) for way in ways),
        )
    return table


def show_agreement(figures: dict, differences: list[Difference]) -> None:
    total = sum(figures["prompts"].values())
    same = "the same" if figures["same_prompts"] else "NOT the same"
    console.print(
        f"Greedy outputs of {VLLM} and transformers: {total - len(differences)} of "
        f"{total} equal; the prompts' token ids are {same}."
    )
    if not differences:
        return
    table = new_table("Where the others part", "phase")
    for column in ("sample", "token", VLLM, "transformers"):
        table.add_column(column, justify="right")
    table.add_column(f"gap, {VLLM}", justify="right")
    table.add_column("gap, transformers", justify="right")
    table.add_column("")
    for d in differences:
        table.add_row(
            d.phase,
            str(d.index),
            str(d.position),
            *("end" if i is None else str(i) for i in (d.ours, d.theirs)),
            *("" if g is None else f"{g:.1e}" for g in (d.our_gap, d.their_gap)),
            "tie" if d.is_tie else "NO TIE",
        )
    console.print(table)
    console.print(
        f"token: how many are equal before. gap: nats between the two likeliest there; "
        f"below {TIE:g} it is a tie."
    )


def new_table(title: str, first: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column(first, no_wrap=True)
    return table


def spread(seconds: Sequence[float]) -> str:
    half = (max(seconds) - min(seconds)) / 2
    return f"{statistics.median(seconds):.2f} ±{half:.2f}"


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    return f"{statistics.median(seconds) / statistics.median(base):.1f}×"
