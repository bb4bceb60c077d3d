# SPDX-License-Identifier: Apache-2.0
"""Scoring, routing and drafting of large models, by formulas; writes docs/scale.md.

    .venv/bin/python benchmarks/roofline.py

A layer's time on a GPU is the longer of reading its weights and keys, and its
arithmetic; on a CPU, where arithmetic does not hide the reading, it is their sum. The
CPU's three rates are taken from the full-depth column of the measured tables, and the
other columns are then predicted: that is how far the formulas can be trusted.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8)
PAYS = 1.1
"""Times as fast from which something is said to pay."""
ERROR = 0.12
"""The most by which a predicted ratio may differ from a measured one, as a part of it."""
SHARES, EXITS = (0.5, 0.2, 0.3), (6 / 16, 10 / 16, 1.0)
"""Of the tokens, which part leaves after which part of the layers; 0.61 on average."""
CONTEXT = 2048


class Model(NamedTuple):
    """Shape of a decoder. A weight and a key take `size` bytes."""

    name: str
    layers: int
    hidden: int
    inner: int
    kv: int  # width of the keys
    vocabulary: int
    size: int = 2

    @property
    def keys_values(self) -> int:
        """Weights of a layer's projection of keys and values."""
        return 2 * self.hidden * self.kv

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        attention = 2 * self.hidden * self.hidden + self.keys_values
        return attention + 3 * self.hidden * self.inner

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.hidden * self.vocabulary

    def cache(self, context: int) -> int:
        """Bytes of keys and values that a token reads in a layer."""
        return 2 * context * self.kv * self.size


class Device(NamedTuple):
    """Rates that can be reached."""

    name: str
    bandwidth: float  # bytes a second, of weights
    arithmetic: float  # operations a second
    attention: float  # bytes a second, of keys and values
    overlaps: bool  # whether arithmetic hides the reading

    def seconds(self, weights: float, rows: float, cached: float, size: int) -> float:
        """Of products of `rows` tokens with `weights`, and reading `cached` bytes."""
        read, compute = weights * size / self.bandwidth, 2 * weights * rows / self.arithmetic
        product = max(read, compute) if self.overlaps else read + compute
        return product + cached / self.attention


MODELS = (
    Model("8B", 32, 4096, 14_336, 1024, 128_256),
    Model("70B", 80, 8192, 28_672, 1024, 128_256),
    Model("405B", 126, 16_384, 53_248, 1024, 128_256),
)
MEMORY_PART, ARITHMETIC_PART = 0.8, 0.6
"""Parts of the data sheets' figures that kernels are taken to reach."""
SHEETS = {"H100": (3.35e12, 989e12, 80e9), "H200": (4.8e12, 989e12, 141e9)}
"""Bytes and dense bfloat16 operations a second, bytes of memory (SXM)."""
GPUS = {
    ("8B", "H100"): 1, ("70B", "H100"): 4, ("405B", "H100"): 16,
    ("8B", "H200"): 1, ("70B", "H200"): 2, ("405B", "H200"): 8,
}  # fmt: skip
"""Devices that hold the weights and leave room for keys."""
CPU = Model("measured", 16, 1024, 2816, 512, 4096, size=4)
"""Of the tables of `test_depth_routing.py`."""


def gpus(name: str, count: int) -> Device:
    """Several devices as one; what they say to each other is not counted."""
    bandwidth, arithmetic, _ = SHEETS[name]
    read = MEMORY_PART * bandwidth * count
    return Device(name, read, ARITHMETIC_PART * arithmetic * count, read, True)


def step(model: Model, device: Device, counts: list[float], context: int) -> float:
    """Seconds of a decode step; `counts` tokens leave at each of `EXITS`.

    Keys and values of those that left are still made, in one product with the others'.
    """
    rows = sum(counts)
    total = device.seconds(model.head, rows, 0, model.size)
    for layer in range(model.layers):
        active = sum(n for n, at in zip(counts, EXITS) if at * model.layers > layer)
        if active:
            cached = active * model.cache(context)
            total += device.seconds(model.layer, active, cached, model.size)
            gone = 2 * model.keys_values * (rows - active) / device.arithmetic
            total += 0 if device.overlaps and reads(model, device, active) else gone
        else:
            total += device.seconds(model.keys_values, rows, 0, model.size)
    return total


def reads(model: Model, device: Device, rows: float) -> bool:
    """Whether a layer's weights are what takes the time, so that more rows are free."""
    return model.size / device.bandwidth > 2 * rows / device.arithmetic


def full(model: Model, device: Device, rows: float, context: int) -> float:
    return step(model, device, [0, 0, rows], context)


def staircase(model: Model, device: Device, rows: float, context: int) -> float:
    """Times as fast as full depth, if `SHARES` leave at `EXITS`."""
    counts = [share * rows for share in SHARES]
    return full(model, device, rows, context) / step(model, device, counts, context)


def one_exit(model: Model, device: Device, rows: float, context: int) -> float:
    """Times as fast as full depth, if all leave at the middle one."""
    return full(model, device, rows, context) / step(model, device, [0, rows, 0], context)


def drafted(
    model: Model, device: Device, rows: int, context: int, acceptance: float
) -> tuple[float, int]:
    """Drafting, an eighth of the layers drafting: times as fast, best length.

    Each draft is accepted with the same probability, until one is not. Drafted rows'
    states are kept: the verification of k drafts runs the layers after the exit for
    k + 1 rows of each sequence, and the first layers for the last draft only. Keys of a
    sequence are read once for all its rows.
    """
    exit_layer = model.layers // 8
    plain = full(model, device, rows, context)
    cached = rows * model.cache(context)
    head = device.seconds(model.head, rows, 0, model.size)
    layer = device.seconds(model.layer, rows, cached, model.size)
    found = []
    for k in range(1, 7):
        tokens = sum(acceptance**i for i in range(k + 1))
        draft = exit_layer * layer + head
        verified = device.seconds(model.layer, rows * (k + 1), cached, model.size)
        last = (model.layers - exit_layer) * verified + exit_layer * layer
        last += device.seconds(model.head, rows * (k + 1), 0, model.size)
        found.append((tokens * plain / (k * draft + last), k))
    return max(found)


# ------------------------------------------------------------------ the check


class Checked(NamedTuple):
    """A measured ratio and what the formulas say."""

    table: str
    batch: int
    context: int
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def measured(text: str, title: str) -> list[dict[str, str]]:
    """The rows of the first table of a Markdown page after a line with `title`."""
    _, _, rest = text.partition(title)
    lines = [line for line in rest.split("\n|", 1)[1].split("\n\n")[0].splitlines()]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def fit(model: Model, rows: list[dict[str, str]]) -> Device:
    """The three rates that give the full-depth column, by least squares of its parts."""
    weights = model.layers * model.layer + model.head
    terms, times = [], []
    for row in rows:
        batch, context = int(row["batch"]), int(row["context"])
        time = float(row["full depth, ms"]) / 1e3
        cached = model.layers * batch * model.cache(context)
        terms.append(np.array([weights * model.size, 2 * weights * batch, cached]) / time)
        times.append(1.0)
    rates = np.linalg.lstsq(np.array(terms), np.array(times), rcond=None)[0]
    bandwidth, arithmetic, attention = 1 / rates
    return Device("CPU", bandwidth, arithmetic, attention, False)


def check(page: str) -> tuple[list[Checked], list[Device]]:
    """The ratios of both measured tables, beside the formulas'."""
    found, devices = [], []
    ways: dict[str, Callable] = {"staircase": staircase, "all exit at 10": one_exit}
    for table, title, vocabulary in (
        ("compiled", "Compiled segments against the compiled default", 4096),
        ("eager", "Eager against eager, vocabulary 32,000", 32_000),
    ):
        model, rows = CPU._replace(vocabulary=vocabulary), measured(page, title)
        device = fit(model, rows)
        devices.append(device)
        for row in rows:
            batch, context = int(row["batch"]), int(row["context"])
            for what, way in ways.items():
                ratio = float(re.match(r"[\d.]+", row[what])[0])
                predicted = way(model, device, batch, context)
                found.append(Checked(table, batch, context, what, ratio, predicted))
    return found, devices


def check_drafting(page: str) -> list[Checked]:
    """Of the drafts of fixed length at batch 1: tokens a round by counted weights."""
    model = Model("inflated", 12, 1024, 3072, 512, 4096)
    whole, found = model.layers * model.layer + model.head, []
    for title in ("### In float32", "### Drafts of a model trained without early exits"):
        case = ""
        for row in measured(page, title):
            case = row["batch"] or case
            match = re.fullmatch(r"exit after (\d), k = (\d)", row["way"])
            if match and case.startswith("1,"):
                exit_layer, k = map(int, match.groups())
                draft = exit_layer * model.layer + 3 * model.hidden**2 + model.head
                tokens = 1 + k * float(row["accepted"])
                speed = float(re.match(r"[\d.]+", row["times plain"])[0])
                predicted = tokens / (1 + k * draft / whole)
                what = f"{row['way']}, {case.partition(', ')[2]}"
                what += ", plain model" if "without" in title else ""
                found.append(Checked("drafting", 1, 0, what, speed, predicted))
    return found


# ------------------------------------------------------------------ the page


def table(columns: list, rows: list[list]) -> list[str]:
    lines = ["| " + " | ".join(map(str, columns)) + " |"]
    lines.append("| --- |" + " ---: |" * (len(columns) - 1))
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def begins(ratios: list[float], last: bool = False) -> str:
    """The first, or last, batch at which a ratio reaches `PAYS`."""
    paying = [batch for batch, ratio in zip(BATCHES, ratios) if ratio >= PAYS]
    return str(paying[-1 if last else 0]) if paying else "none"


def fits(model: Model, name: str) -> int:
    """How many sequences of `CONTEXT` tokens fit beside the weights, at 90 % of memory."""
    weights = (model.layers * model.layer + 2 * model.head) * model.size
    free = 0.9 * SHEETS[name][2] * GPUS[model.name, name] - weights
    return int(free / (model.layers * model.cache(CONTEXT)))


def scoring_rows() -> list[list]:
    """Scoring 8,192 rows of one prompt, in one H100's seconds a device."""
    rows = 8192
    found = []
    for model in MODELS:
        count = GPUS[model.name, "H100"]
        device = gpus("H100", count)
        prefill = model.layers * device.seconds(model.layer, rows, 0, model.size)
        head = device.seconds(model.head, rows, 0, model.size)
        logits = rows * model.vocabulary
        read = logits * model.size / device.bandwidth
        results = [f"{rows * (8 * k + 4) / 1e6:.1f}" for k in (1, 8, 64)]
        found.append([
            model.name, count, f"{prefill * 1e3:.0f}", f"{head * 1e3:.1f}",
            f"{read * 1e3:.2f}", f"{10 * 2 * read * 1e3:.1f}", f"{logits * 4 / 1e9:.1f}",
            *results,
        ])  # fmt: skip
    return found


def page() -> str:
    """The text of docs/scale.md."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    checked, devices = check(text)
    drafting = check_drafting((ROOT / "benchmarks" / "README.md").read_text())
    lines = [
        "# 8B, 70B and 405B on H100 and H200, by formulas", "",
        "Written by `.venv/bin/python benchmarks/roofline.py`. **No step here was measured "
        "on a GPU.** The formulas know weights, keys, arithmetic and the head; they know "
        "no launches, no communication between devices, no attention arithmetic and no "
        "scheduler. bfloat16, 128,256 words, a context of "
        f"{CONTEXT:,} tokens, {MEMORY_PART:.0%} of the data sheet's bandwidth and "
        f"{ARITHMETIC_PART:.0%} of its arithmetic. On an H200 a copy reached 88% of the one and "
        "the head's product 70% of the other ([seen "
        "there](../benchmarks/README.md#on-an-h200)). What the host takes comes on top where "
        "steps are not scheduled ahead: with drafts 3 to 5 ms a round [were "
        "measured](../benchmarks/README.md#drafting-on-an-h200), more than a small model's "
        "step takes.", "",
        "## Which flags", "",
        *table(["model", "H100", "H200"], [
            [m.name, *(
                f"`--tensor-parallel-size {GPUS[m.name, d]}`" if GPUS[m.name, d] <= 8
                else f"`--tensor-parallel-size 8` on {GPUS[m.name, d] // 8} nodes of 8 "
                "devices needs pipeline parallelism, which depth routing refuses"
                for d in SHEETS
            )] for m in MODELS
        ]),
        "Sequences of that context whose keys fit beside the weights, at 90 % of memory: "
        + "; ".join(
            f"{m.name} on {GPUS[m.name, d]} {d} {fits(m, d)}" for d in SHEETS for m in MODELS
        )
        + ". What the tables say of larger batches is for shorter contexts or smaller keys.",
        "", "## Scoring", "",
        "One prompt of which 8,192 rows are scored, on the H100s above. The product of the "
        "head is what scoring adds to a prefill. One read of the logits is what the kernel "
        "needs; ten reads and writes of float32 are what eager operations move.", "",
        *table(["model", "devices", "prefill, ms", "head, ms", "one read, ms",
                "ten of float32, ms", "all logits, GB", "results of 1 candidate, MB",
                "of 8", "of 64"], scoring_rows()),
        "The logits are never there at once: the fork takes a bounded number of rows at a "
        "time. Ranks and log-probabilities take 8 bytes a candidate, an entropy 4 a row.", "",
    ]  # fmt: skip
    for name in SHEETS:
        lines += [f"## Decoding on {name}", ""]
        rows = []
        for model in MODELS:
            device = gpus(name, GPUS[model.name, name])
            ratios = [staircase(model, device, b, CONTEXT) for b in BATCHES]
            rows.append([model.name, *(f"{r:.2f}" for r in ratios), begins(ratios)])
        lines += ["Depth routing, half, a fifth and three tenths of the tokens leaving "
                  "after 6, 10 and 16 sixteenths of the layers: times as fast as full "
                  f"depth. It pays ({PAYS} times) from the batch in the last column on; "
                  "below, what it gains is keys that are not read.", ""]  # fmt: skip
        lines += table(["model", *BATCHES, "pays from"], rows)
        rows = []
        for model in MODELS:
            device = gpus(name, GPUS[model.name, name])
            for acceptance in ACCEPTANCES:
                ways = [drafted(model, device, b, CONTEXT, acceptance) for b in BATCHES]
                cells = [f"{ratio:.2f} ({k})" for ratio, k in ways]
                last = begins([ratio for ratio, _ in ways], last=True)
                rows.append([f"{model.name}, {acceptance}", *cells, last])
        lines += ["Drafting with an eighth of the layers, which loses nothing: times as fast as "
                  "plain decoding, and the best number of drafts. It pays up to the batch "
                  "in the last column.", ""]  # fmt: skip
        lines += table(["model, acceptance", *BATCHES, "pays to"], rows)
    worst = max(checked + drafting, key=lambda one: one.error)
    mean = np.mean([one.error for one in checked + drafting])
    lines += [
        "## How far to trust it", "",
        "The same formulas, with times added up because arithmetic hides no reading on a "
        "CPU, and rates from the full-depth column of "
        "[the measured tables](../benchmarks/README.md#depth-routing): "
        + "; ".join(
            f"{d.bandwidth / 1e9:.0f} GB/s of weights, {d.arithmetic / 1e9:.0f} GFLOP/s, "
            f"{d.attention / 1e9:.1f} GB/s of keys" for d in devices
        )
        + f". The ratios differ by {mean:.1%} on average and {worst.error:.1%} at most "
        f"({worst.table}, batch {worst.batch}, {worst.what}); a test allows {ERROR:.0%}. "
        "What a GPU adds to that is unknown.", "",
        *table(["table", "batch", "context", "what", "measured", "formulas"], [
            [c.table, c.batch, c.context or "", c.what, f"{c.measured:.2f}",
             f"{c.predicted:.2f}"] for c in checked + drafting
        ]),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
