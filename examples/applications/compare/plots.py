# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG and SVG: KL against size, the histogram of Δp, figures by confidence."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare.figures import HISTOGRAM, Z
from compare.plan import NOISE
from compare.tables import floor_of, scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (7.5, 4.5)  # inches
MARKERS = "osD^vP*X<>"


def draw(
    report: dict[str, Any], models: list[dict[str, Any]], folder: Path
) -> list[str]:
    """Draws all plots.

    Returns:
        Names of the files, without their endings.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "compare"  # the same file for the same plot
    good = scored(models)
    if not good:
        return []
    names = []
    for function in PLOTS:
        figure = function(report, good)
        if figure is not None:
            names.append(function.__name__)
            save(figure, folder / function.__name__)
    return names


def save(figure: "Figure", path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=120, metadata={"Software": None})
    plt.close(figure)


def new_figure(columns: int = 1) -> tuple["Figure", Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(
        1, columns, figsize=(SIZE[0] * max(columns * 0.8, 1), SIZE[1]),
        layout="constrained",
    )  # fmt: skip


def style(number: int) -> dict[str, str]:
    """Tens of models: a colour and a marker are the same for none of 100."""
    color = f"C{number % 10}"
    return {"color": color, "marker": MARKERS[(number + number // 10) % len(MARKERS)]}


def without_floor(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [model for model in models if model["model"] != NOISE]


def kl_against_size(
    report: dict[str, Any], models: list[dict[str, Any]]
) -> "Figure | None":
    sized = [model for model in without_floor(models) if model["size_on_disk"]]
    if not sized:
        return None
    figure, axes = new_figure()
    for number, model in enumerate(sized):
        estimate = model["figures"]["kl"]["estimate"]
        size = model["size_on_disk"] / 2**20
        axes.errorbar(
            size, estimate["mean"], Z * (estimate["standard_error"] or 0), capsize=3,
            linestyle="none", **style(number),
        )  # fmt: skip
        axes.annotate(model["model"], (size, estimate["mean"]), xytext=(6, 4),
                      textcoords="offset points", fontsize=9)  # fmt: skip
    logarithmic = all(m["figures"]["kl"]["estimate"]["mean"] > 0 for m in sized)
    if logarithmic:
        axes.set_yscale("log")
    floor = floor_of(report)
    if floor and (floor["kl"]["estimate"]["mean"] > 0 or not logarithmic):
        mark_floor(axes, floor["kl"]["estimate"]["mean"])
    axes.margins(x=0.25)
    axes.set_xlabel("MiB of weights on disk")
    axes.set_ylabel("KL(reference || model), nats a token")
    return figure


def mark_floor(axes: "Axes", value: float) -> None:
    axes.axhline(value, color="gray", linestyle="--", linewidth=1)
    axes.annotate(NOISE, (0.01, value), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points", color="gray",
                  fontsize=8)  # fmt: skip


def probability_change(
    report: dict[str, Any], models: list[dict[str, Any]]
) -> "Figure":
    import numpy as np

    figure, axes = new_figure()
    reach = 0.0  # of the greatest change, either way
    for number, model in enumerate(models):
        counts = model["figures"]["delta_p"]["histogram"]
        shares = [count / sum(counts) for count in counts]
        noise = model["model"] == NOISE
        color = "gray" if noise else f"C{(number - (models[0]['model'] == NOISE)) % 10}"
        reach = max([reach, *abs(HISTOGRAM[:-1][np.flatnonzero(counts)])])
        axes.stairs(shares, HISTOGRAM, label=model["model"], color=color, fill=noise,
                    alpha=0.4 if noise else 1)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(-1.1 * reach, 1.1 * reach)
    axes.set_xlabel("Δp: change of the right token's probability")
    axes.set_ylabel("share of the positions")
    axes.legend(fontsize=8)
    return figure


def by_confidence(report: dict[str, Any], models: list[dict[str, Any]]) -> "Figure":
    figure, (left, right) = new_figure(2)
    shift = models[0]["model"] == NOISE
    for number, model in enumerate(models):
        buckets = model["figures"]["by_confidence"]
        middle = [(bucket["from"] + bucket["to"]) / 2 for bucket in buckets]
        noise = model["model"] == NOISE
        look = {"color": "gray", "linestyle": "--"} if noise else style(number - shift)
        look |= {"label": model["model"], "markersize": 4}
        left.plot(middle, [b["kl"]["estimate"]["mean"] for b in buckets], **look)
        different = [1 - b["top_1_agreement"]["mean"] for b in buckets]
        right.plot(middle, different, **look)
    left.set_ylabel("KL(reference || model), nats a token")
    right.set_ylabel("share with another top token")
    for axes in (left, right):
        set_log(axes)
        axes.set_xlabel("probability of the reference's top token")
    right.legend(fontsize=8)
    return figure


def set_log(axes: "Axes") -> None:
    """Makes the values' axis logarithmic, if there are some; zeros are left out."""
    import numpy as np

    values = [np.array(line.get_ydata(), float) for line in axes.lines]
    if not any((value > 0).any() for value in values):
        return
    for line, value in zip(axes.lines, values):
        line.set_ydata(np.where(value > 0, value, np.nan))
    axes.set_yscale("log")


PLOTS = (kl_against_size, probability_change, by_confidence)
"""Their files are named as they are."""
