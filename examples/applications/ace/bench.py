# SPDX-License-Identifier: Apache-2.0
"""The three phases with transformers and with vLLM: one model, prompts and machine.

The prompts of a phase are made from what vLLM said in the one before, so that all ways
are timed on the same prompts. vLLM's prefix cache is emptied before each measurement:
what it shares, it shares within the phase. Where a speculative configuration is given,
vLLM is timed without and with it, in turns.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ace import prompts
from ace.chat import Completion, Conversation, Sampling
from ace.client import LLMClient
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
SPECULATIVE = "vLLM, speculative"
COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
"""Of vLLM, in tokens."""


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
    with ExitStack() as stack:
        engines = load_engines(settings, stack)
        client = engines[VLLM]
        work, said = make_work(client, samples, settings, sampling)
        measured, _ = measure(engines, work, sampling, settings.repeats)
        seconds |= measured
        one_by_one = time_all(
            {
                VLLM: lambda: [
                    client.chat([c], sampling["reflector"]) for c in work["reflector"]
                ]
            },
            settings.repeats,
            "vLLM, reflector, one by one",
            client.engine.reset_prefix_cache,
        )[VLLM]
        ours = top_two(client, work, sampling)
        if SPECULATIVE in engines:
            found, counts = count_drafts(engines[SPECULATIVE], work, sampling)
            parted = compare(ours, found)
            speculative = counts | {"same_prompts": same_prompts(ours, found)}
        engines.clear()  # else they would stay in memory
    for name, size in ways.items():
        with settings.load("transformers", batch_size=size) as client:
            measured, found = measure({name: client}, work, sampling, settings.repeats)
            seconds |= measured
            if name == ONE:
                theirs = found[name]
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
        "same_prompts": same_prompts(ours, theirs),
        "differences": dump(differences),
    }
    if settings.speculative_config is not None:
        figures["speculative"] = speculative | {"differences": dump(parted)}
    try:
        if settings.output:
            replace_file(settings.output, json.dumps(figures, indent=1) + "\n")
    finally:
        show(figures, ways, differences)
        if settings.speculative_config is not None:
            show_speculative(figures, parted)
    return figures


def load_engines(settings: "BenchSettings", stack: ExitStack) -> dict[str, LLMClient]:
    """vLLM, and vLLM with speculative decoding if it is asked for."""
    if settings.speculative_config is None:
        return {VLLM: stack.enter_context(settings.load("vllm"))}
    # Only the engine that starts last is found in the registry of counters. The other
    # one counts too, so that both have the work of it.
    counting = settings.engine_args | {"disable_log_stats": False}
    settings = settings.model_copy(update={"engine_args": counting})
    plain = settings.model_copy(update={"speculative_config": None})
    return {
        VLLM: stack.enter_context(plain.load("vllm")),
        SPECULATIVE: stack.enter_context(settings.load("vllm")),
    }


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
    clients: dict[str, LLMClient],
    work: Work,
    sampling: dict[Phase, Sampling],
    repeats: int,
) -> tuple[dict[str, dict[Phase, Times]], dict[str, dict[Phase, list[Completion]]]]:
    """What each phase takes as one batch, and what was said, by client. They are
    measured in turns."""
    said: dict[str, dict] = {name: {} for name in clients}
    seconds: dict[str, dict] = {name: {} for name in clients}
    engines = [client.engine for client in clients.values() if client.engine]

    def ask(name: str, phase: Phase) -> None:
        said[name][phase] = clients[name].chat(work[phase], sampling[phase])

    def fresh() -> None:
        for engine in engines:
            engine.reset_prefix_cache()

    for client in clients.values():
        client.chat(work["generator"][:2], sampling["generator"])  # warms up
    for phase in PHASES:
        calls = {name: partial(ask, name, phase) for name in clients}
        described = f"{' and '.join(clients)}, {phase}"
        for name, times in time_all(calls, repeats, described, fresh).items():
            seconds[name][phase] = times
    return seconds, said


def time_all(
    calls: dict[str, Callable[[], object]],
    repeats: int,
    described: str,
    fresh: Callable[[], object],
) -> dict[str, Times]:
    """Of each call, in turns; `fresh` is called before each."""
    times = {name: Times([], []) for name in calls}
    for _ in tqdm(range(repeats), desc=described, disable=None):
        for name, call in calls.items():
            fresh()
            begin, processor = time.perf_counter(), processor_seconds()
            call()
            times[name].wall.append(time.perf_counter() - begin)
            times[name].processor.append(processor_seconds() - processor)
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
    return {p: client.chat(work[p], sampling[p], top=2) for p in work}


def count_drafts(
    client: LLMClient, work: Work, sampling: dict[Phase, Sampling]
) -> tuple[dict[Phase, list[Completion]], dict[str, dict[str, int]]]:
    """As `top_two`; and how many tokens were drafted and accepted, by phase."""
    said, counts = {}, {kind: {} for kind in COUNTERS}
    for phase in PHASES:
        client.engine.reset_prefix_cache()
        before = counters(client.engine)
        said |= top_two(client, {phase: work[phase]}, sampling)
        for kind, value in counters(client.engine).items():
            counts[kind][phase] = value - before[kind]
    for by_phase in counts.values():
        by_phase["total"] = sum(by_phase.values())
    return said, counts


def counters(engine: Any) -> dict[str, int]:
    """Tokens so far, drafted and accepted."""
    found = engine.get_metrics()
    return {
        kind: sum(metric.value for metric in found if metric.name == name)
        for kind, name in COUNTERS.items()
    }


def same_prompts(
    ours: dict[Phase, list[Completion]], theirs: dict[Phase, list[Completion]]
) -> bool:
    """As token ids."""
    return all(
        a.prompt_token_ids == b.prompt_token_ids
        for phase in PHASES
        for a, b in zip(ours[phase], theirs[phase], strict=True)
    )


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


def dump(differences: Sequence[Difference]) -> list[dict]:
    return [asdict(d) | {"tie": d.is_tie} for d in differences]


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
    show_agreement("transformers", figures, figures["same_prompts"], differences)


def show_speculative(figures: dict, differences: list[Difference]) -> None:
    counts = figures["speculative"]
    table = new_table(f"{VLLM} without and with speculative decoding, wall seconds", "")
    for column in ("without", "with", "ratio", "ratio, processor", *COUNTERS, "share"):
        table.add_column(column, justify="right")
    for phase in (*PHASES, "total"):
        ours, theirs = (figures["seconds"][way][phase] for way in (VLLM, SPECULATIVE))
        drafted, accepted = (counts[kind][phase] for kind in COUNTERS)
        table.add_row(
            phase,
            *(spread(times["wall"]) for times in (ours, theirs)),
            *(ratio(ours[kind], theirs[kind], 2) for kind in Times._fields),
            str(drafted),
            str(accepted),
            f"{accepted / drafted:.1%}" if drafted else "",
        )
    console.print(table)
    console.print("ratio: how many times as fast it is with it. drafted: tokens.")
    show_agreement(SPECULATIVE, figures, counts["same_prompts"], differences)


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


def show_agreement(
    other: str, figures: dict, same_prompts: bool, differences: list[Difference]
) -> None:
    total = sum(figures["prompts"].values())
    same = "the same" if same_prompts else "NOT the same"
    console.print(
        f"Greedy outputs of {VLLM} and {other}: {total - len(differences)} of "
        f"{total} equal; the prompts' token ids are {same}."
    )
    if not differences:
        return
    table = new_table("Where the others part", "phase")
    for column in ("sample", "token", VLLM, other):
        table.add_column(column, justify="right")
    table.add_column(f"gap, {VLLM}", justify="right")
    table.add_column(f"gap, {other}", justify="right")
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


def ratio(seconds: Sequence[float], base: Sequence[float], digits: int = 1) -> str:
    if not statistics.median(base):  # of a phase without prompts
        return ""
    return f"{statistics.median(seconds) / statistics.median(base):.{digits}f}×"
