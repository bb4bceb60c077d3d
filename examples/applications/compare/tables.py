# SPDX-License-Identifier: Apache-2.0
"""The figures as rows of text, for the terminal and for Markdown alike."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

Figures = dict[str, Any]
WITHIN_NOISE = "≈"
"""Stands after a figure that is no further from none than the noise floor's."""

WIDTH = 160  # of tables that do not go to a terminal


class Column(NamedTuple):
    """A figure: its heading, its text, and its size for the comparison with noise."""

    heading: str
    text: Callable[[Figures], str]
    loss: Callable[[Figures], float] | None = None


def text_of(value: float | None, form: str) -> str:
    """Of what is no number, as the error of a single position, nothing."""
    return "" if value is None else f"{value:{form}}"


def plus_minus(value: float | None, error: float | None, form: str, short: str) -> str:
    """The figure and, if there is one, its error."""
    text = text_of(value, form)
    return f"{text} ±{error:{short}}" if text and error is not None else text


def with_error(value: dict[str, float]) -> str:
    return plus_minus(value["mean"], value["standard_error"], ".4g", ".2g")


def share(value: dict[str, float]) -> str:
    return plus_minus(value["mean"], value["standard_error"], ".2%", ".2%")


def rms(value: dict[str, float]) -> str:
    return plus_minus(value["value"], value["standard_error"], ".3%", ".2%")


def interval(value: dict[str, float]) -> str:
    text = text_of(value["value"], ".4f")
    if value["low"] is None or value["high"] is None:
        return text
    return f"{text} ({value['low']:.4f} to {value['high']:.4f})"


def distance(value: float | None, none: float) -> float:
    """How far a figure is from no loss; NaN of what is no number."""
    return math.nan if value is None else abs(value - none)


PERPLEXITY = [
    Column("perplexity (95 %)", lambda f: interval(f["perplexity"]),
           lambda f: abs(f["log_perplexity_ratio"]["mean"])),
    Column("ratio to the reference, paired (95 %)",
           lambda f: interval(f["perplexity_ratio"]),
           lambda f: abs(f["log_perplexity_ratio"]["mean"])),
    Column("correlation", lambda f: text_of(f["correlation"], ".4%"),
           lambda f: distance(f["correlation"], 1)),
    Column("bits/byte", lambda f: text_of(f["bits_per_byte"], ".4f"),
           lambda f: distance(f["bits_per_byte"], f["reference_bits_per_byte"] or 0)),
]  # fmt: skip
DIVERGENCE = [
    Column("KL, nats", lambda f: with_error(f["kl"]["estimate"]),
           lambda f: kl_mean(f)),
    Column("KL at least", lambda f: with_error(f["kl"]["lower_bound"]),
           lambda f: f["kl"]["lower_bound"]["mean"]),
    Column("median", lambda f: kl_percentile(f, "p50"), lambda f: kl_of(f, "p50")),
    Column("99 %", lambda f: kl_percentile(f, "p99"), lambda f: kl_of(f, "p99")),
    Column("99.9 %", lambda f: kl_percentile(f, "p99.9"), lambda f: kl_of(f, "p99.9")),
    Column("max", lambda f: kl_percentile(f, "max"), lambda f: kl_of(f, "max")),
]  # fmt: skip
CHOICES = [
    Column("same top token", lambda f: share(f["top_1_agreement"]),
           lambda f: 1 - f["top_1_agreement"]["mean"]),
    Column("flips", lambda f: share(f["flips"]), lambda f: f["flips"]["mean"]),
    Column("right to wrong", lambda f: f"{f['flips']['right_to_wrong']:.2%}",
           lambda f: f["flips"]["right_to_wrong"]),
    Column("Δp mean", lambda f: f"{f['delta_p']['mean']:+.3%}",
           lambda f: abs(f["delta_p"]["mean"])),
    Column("Δp RMS", lambda f: rms(f["delta_p"]["rms"]),
           lambda f: f["delta_p"]["rms"]["value"]),
    Column("Δp 1 %", lambda f: f"{f['delta_p']['percentiles']['p1']:+.2%}",
           lambda f: abs(f["delta_p"]["percentiles"]["p1"])),
    Column("Δp 99 %", lambda f: f"{f['delta_p']['percentiles']['p99']:+.2%}",
           lambda f: abs(f["delta_p"]["percentiles"]["p99"])),
]  # fmt: skip
SECTIONS = {
    "Perplexity": PERPLEXITY,
    "KL(reference || model)": DIVERGENCE,
    "Choices, and the right token's probability": CHOICES,
}
"""One table each."""


def kl_mean(figures: Figures) -> float:
    return figures["kl"]["estimate"]["mean"]


def kl_of(figures: Figures, name: str) -> float:
    return figures["kl"]["lower_bound_percentiles"][name]


def kl_percentile(figures: Figures, name: str) -> str:
    return f"{kl_of(figures, name):.3g}"


def cell(column: Column, figures: Figures, floor: Figures | None) -> str:
    """The figure's text, marked if the noise floor's is as large."""
    text = column.text(figures)
    if floor is None or figures is floor or column.loss is None:
        return text
    within = column.loss(figures) <= column.loss(floor)
    return f"{text} {WITHIN_NOISE}" if within else text


def mebibytes(size: int | None) -> str:
    return f"{size / 2**20:,.1f}" if size else ""


def rows(
    columns: list[Column], models: list[dict[str, Any]], floor: Figures | None
) -> list[list[str]]:
    """A row of texts a model, the noise floor's first."""
    return [
        [model["model"], *(cell(column, model["figures"], floor) for column in columns)]
        for model in models
    ]


def section_rows(
    columns: list[Column], models: list[dict[str, Any]], report: dict[str, Any]
) -> list[list[str]]:
    """The rows of a table; of perplexities, the reference's too."""
    found = rows(columns, models, floor_of(report))
    if columns is PERPLEXITY and models:
        # Of all positions, if a model has them all.
        few = min((model["figures"] for model in models), key=lambda f: f["non_finite"])
        bits = text_of(few["reference_bits_per_byte"], ".4f")
        own = [interval(few["reference_perplexity"]), "", "", bits]
        found.insert(0, [report["reference"]["model"], *own])
    return found


def outcomes(report: dict[str, Any]) -> list[str]:
    """A sentence for each model without figures."""
    failed = {row["model"]: row["error"] for row in report["failed"]}
    missing = [name for name in report["missing"] if name not in failed]
    return [
        *(f"{name} failed: {short_error(error)}" for name, error in failed.items()),
        *(f"{name} is not scored yet" for name in missing),
    ]


def short_error(error: str) -> str:
    """The last line: of a process that died, its exception."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[-1] if lines else error


def scored(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with figures: not all positions were non-finite."""
    return [model for model in models if "kl" in model["figures"]]


def floor_of(report: dict[str, Any]) -> Figures | None:
    floor = report["noise_floor"]
    return floor["figures"] if floor and "kl" in floor["figures"] else None


def cost_rows(report: dict[str, Any], models: list[dict[str, Any]]) -> list[list[str]]:
    """What each model is and takes, the reference first."""
    reference = report["reference"]
    whole = reference["size_on_disk"]
    result = []
    for model in [reference, *models]:
        size = model["size_on_disk"]
        result.append([
            model["model"], model["dtype"],
            model["quantization"] if model["quantization"] != "None" else "",
            mebibytes(size), f"{size / whole:.1%}" if size and whole else "",
            f"{model['tokens_per_second']:,.0f}",
            str(model.get("figures", model)["non_finite"]),
        ])  # fmt: skip
    return result


COST = [
    "model", "dtype", "quantization", "MiB on disk", "of the reference",
    "scored tokens/s", "rows not finite",
]  # fmt: skip


def by_confidence(
    models: list[dict[str, Any]], column: Column, floor: Figures | None
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of one figure in each bucket of the reference's confidence."""
    rows_of_all = [row for m in models for row in m["figures"]["by_confidence"]]
    buckets = [*{b["from"]: b for b in reversed(rows_of_all)}.values()]
    buckets.sort(key=lambda b: b["from"])
    headings = [f"{b['from']:g} to {b['to']:g} ({b['share']:.0%})" for b in buckets]
    found = {b["from"]: b for b in floor["by_confidence"]} if floor else {}
    result = []
    for model in models:
        there = {b["from"]: b for b in model["figures"]["by_confidence"]}
        texts = [
            cell(column, there[b["from"]],
                 found.get(b["from"]) if model["figures"] is not floor else None)
            if b["from"] in there else ""
            for b in buckets
        ]  # fmt: skip
        result.append([model["model"], *texts])
    return headings, result


def without_interval(name: str) -> Callable[[Figures], str]:
    return lambda figures: text_of(figures[name]["value"], ".4f")


CONFIDENCE_COLUMNS = {
    "Perplexity": PERPLEXITY[0]._replace(text=without_interval("perplexity")),
    "Ratio of perplexities": PERPLEXITY[1]._replace(text=without_interval("perplexity_ratio")),
    "Correlation": PERPLEXITY[2],
    "KL, nats": DIVERGENCE[0],
    "KL, nats, at least": DIVERGENCE[1],
    "KL, 99 %": DIVERGENCE[3],
    "Same top token": CHOICES[0],
    "Flips": CHOICES[1],
    "Δp mean": CHOICES[3],
    "Δp RMS": CHOICES[4],
    "Δp 1 %": CHOICES[5],
    "Δp 99 %": CHOICES[6],
}  # fmt: skip
"""Figures that are shown for each bucket; the JSON has all but bits a byte, as a bucket
has tokens but no text."""


def show(report: dict[str, Any], models: list[dict[str, Any]]) -> None:
    """Prints the tables."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(heading(report))
    good, floor = scored(models), floor_of(report)
    console.print(new_table("Models", COST, cost_rows(report, models)))
    for title, columns in SECTIONS.items():
        names = ["model", *(column.heading for column in columns)]
        console.print(new_table(title, names, section_rows(columns, good, report)))
    short = DIVERGENCE[0]._replace(text=lambda f: text_of(kl_mean(f), ".3g"))
    for title, column in {"KL, nats": short, "Same top token": CHOICES[0]}.items():
        if good:
            names, texts = by_confidence(good, column, floor)
            console.print(
                new_table(f"{title}, by the reference's confidence", ["model", *names], texts)
            )
    if floor:
        console.print(f"{WITHIN_NOISE} no more than the noise floor")
    for sentence in outcomes(report):
        console.print(sentence, style="red", markup=False)


def heading(report: dict[str, Any]) -> str:
    reference, text = report["reference"], report["text"]
    whole = reference["bytes_of_all_logits_in_float16"]
    return (
        f"{text['positions']:,} positions, {text['windows']:,} windows of up to "
        f"{report['plan']['context_length']} tokens; reference {reference['model']} "
        f"({reference['dtype']}), kept in {reference['bytes']:,} bytes "
        f"(all logits in float16: {whole:,}, {whole / reference['bytes']:.3g} times)"
    )


def new_table(title: str, headings: list[str], texts: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for number, name in enumerate(headings):
        table.add_column(name, justify="right" if number else "left")
    for row in texts:
        table.add_row(*row)
    return table
