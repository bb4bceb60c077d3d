# SPDX-License-Identifier: Apache-2.0
"""A page in Markdown that can go into a model card."""

from pathlib import Path
from typing import Any

from compare.files import replacing
from compare.tables import (
    CONFIDENCE_COLUMNS,
    COST,
    SECTIONS,
    WITHIN_NOISE,
    by_confidence,
    cost_rows,
    floor_of,
    heading,
    outcomes,
    scored,
    section_rows,
    text_of,
)

METHOD = """## How to read this

- **Noise floor**: the reference scored against itself in another dtype and other
  batches. {mark} marks a figure that is no more than the noise floor's.
- **Intervals** are 95 %, errors (±) one standard error over the text, by blocks of
  consecutive tokens. The ratio of perplexities is paired: both models score the same
  tokens, so its interval is narrower than either perplexity's.
- **KL** is an unbiased estimate in nats of KL(reference || model): exact terms of the
  reference's {k} most probable tokens, and {m} tokens a position drawn from all others.
  **KL at least** is exact, and a lower bound: the divergence over those {k} tokens and
  "any other". The percentiles are of that bound.
- **Same top token**: greedy decoding would choose the same. **Flips**: the choice turned
  from right to wrong or from wrong to right.
- **Δp**: change of the right token's probability.
- **Confidence**: the probability of the reference's most probable token.
"""


def write_page(
    report: dict[str, Any], models: list[dict[str, Any]], path: Path, plots: list[str]
) -> None:
    good, floor = scored(models), floor_of(report)
    plan = report["plan"]
    parts = [f"# Compared with {report['reference']['model']}", heading(report) + "."]
    parts.append(settings(report))
    parts += ["## Models", markdown(COST, cost_rows(report, models))]
    for title, columns in SECTIONS.items():
        names = ["model", *(column.heading for column in columns)]
        parts += [f"## {title}", markdown(names, section_rows(columns, good, report))]
    parts += [f"![{name}]({name}.png)" for name in plots]
    if good:
        parts.append("## By the reference's confidence")
        for title, column in CONFIDENCE_COLUMNS.items():
            names, texts = by_confidence(good, column, floor)
            parts += [f"{title}:", markdown(["model", *names], texts)]
        parts += ["## Percentiles of Δp", percentile_table(good)]
        parts += ["## The bound with fewer candidates", bound_table(good)]
    parts += [escape(sentence) + "." for sentence in outcomes(report)]
    parts.append(
        METHOD.format(mark=WITHIN_NOISE, k=plan["top_k"], m=plan["tail_samples"])
    )
    with replacing(path) as partial:
        partial.write_text("\n\n".join(parts), encoding="utf-8")


def settings(report: dict[str, Any]) -> str:
    """What the figures are of."""
    plan = report["plan"]
    texts = {key: value for key, value in plan["texts"].items() if value is not None}
    if "dataset" not in texts:
        texts.pop("dataset_split"), texts.pop("text_column")
    said = "; ".join(f"{key} {short(value)}" for key, value in texts.items())
    stride = plan["stride"] or max(plan["context_length"] // 2, 1)
    return (
        f"Text: {said}. Windows of {plan['context_length']} tokens, stride {stride}. "
        f"vLLM {report['reference']['vllm']}."
    )


def short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def percentile_table(models: list[dict[str, Any]]) -> str:
    names = [*models[0]["figures"]["delta_p"]["percentiles"]]
    headings = [name.replace("p", "") + (" %" if name[0] == "p" else "") for name in names]
    texts = []
    for model in models:
        found = model["figures"]["delta_p"]["percentiles"]
        texts.append([model["model"], *(text_of(found[name], "+.3%") for name in names)])
    return markdown(["model", *headings], texts)


def bound_table(models: list[dict[str, Any]]) -> str:
    """How the lower bound grows with the number of candidates."""
    few = [*models[0]["figures"]["kl_lower_bound_of_fewer_candidates"]]
    texts = []
    for model in models:
        found = model["figures"]["kl_lower_bound_of_fewer_candidates"]
        estimate = model["figures"]["kl"]["estimate"]["mean"]
        values = [*(found[name] for name in few), estimate]
        texts.append([model["model"], *(text_of(value, ".4g") for value in values)])
    return markdown(["model", *few, "estimate of all"], texts)


def markdown(headings: list[str], texts: list[list[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *texts]
    return "\n".join("| " + " | ".join(escape(t) for t in row) + " |" for row in lines)


def escape(text: str) -> str:
    return text.replace("|", "\\|")
