# SPDX-License-Identifier: Apache-2.0
"""Fits what a token that leaves early says, and what leaving costs it.

    utio=examples/applications/utio
    .venv/bin/python $utio/utio_calibrate.py --cutoffs 6 --output probe.safetensors
    .venv/bin/python $utio/utio_calibrate.py --model facebook/opt-125m --cutoffs 4 8 \\
        --text book.txt notes/ --tokens 200000 --output opt.safetensors

Let x be a token's residual stream after `cutoff` layers. Its features are x / rms(x),
with rms(x) = sqrt(mean(x²) + 1e-6). From them, for each cutoff,

- a translator makes a state like those after the last layer, which the final norm and
  the head then take instead of x (`--no-translators` leaves x), and
- a probe predicts the square root of KL, the divergence of the next-token distribution
  that leaving there gives from the one of full depth, in nats, and
- two acceptance probes predict the probability that full depth accepts a token that is
  drafted there: where both take the most probable token, and where both draw one.

All are networks of one hidden layer, a translator's beside a linear map, fitted by
gradient descent (utio_fit.py): probes by least squares, acceptance probes by
cross-entropy, translators to the divergence of what the final norm and the head make of
them, from a ridge regression on. What they are fitted to lies in scratch files beside the
output: two bytes a number, token and cutoff, and four for full depth.

Translators do better on the text that they are fitted to than on other text. So probes
are fitted to what two more translators do, each of which is fitted to one half of the text
and asked about the other (cross-fitting).

The figures printed are of a part of the text that nothing was fitted to. They are
teacher forcing with full-depth attention: every token attends to keys and values that
full depth wrote. Routed decoding also pays for what leavers write. Leavers are picked
over the whole part, as by a threshold, but for "probe, 32 a step": there each step of
32 tokens, drawn from the part, lets its share go, as serving does.

The last three tables say what it costs to let every token leave at an exit
(utio_exits.py), how many drafts of every token full depth accepts and how well the probes
tell them (rank correlation), and what drafting would gain (utio_drafting.py); the last
lines, how to serve it.

The file has float32 tensors. For cutoff i,

    probe_weight_2[i] @ gelu(probe_weight_1[i] @ features + probe_bias_1[i])
    + probe_bias_2[i]

is higher the more it costs to leave there; their shapes are [cutoffs, width], [cutoffs,
width, hidden], [cutoffs, width] and [cutoffs]. Of the same shapes, but for the width, are
acceptance_greedy_* and acceptance_sampled_*; the sigmoid of what they predict is the
probability of acceptance. The translation is

    translator_weight[i] @ features + translator_bias[i]
    + translator_weight_2[i] @ gelu(translator_weight_1[i] @ features
                                    + translator_bias_1[i])

with [cutoffs, hidden, hidden], [cutoffs, hidden], [cutoffs, hidden, width], [cutoffs,
width, hidden] and [cutoffs, width].
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2]
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "applications")]

import utio_options
from common import quiet
from common.program import any_terminal, interruptible
from utio_options import FAMILIES

if __name__ == "__main__":  # says --help and mistakes before torch is imported
    utio_options.parse_calibrate()
    quiet.hush()
    any_terminal()

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save
from scipy.stats import spearmanr
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from utio_drafting import Drafting, best_drafting, draft_costs, serve_options
from utio_exits import (
    STEP,
    Exit,
    either,
    exits_for_all,
    exits_table,
    lowest_by_step,
    proposal,
)
from utio_fit import Probes, check_finite, fit
from utio_states import Exits, Translator, progress
from utio_texts import count, cut, read_texts, split

FORMAT = "utio-calibration-2"
LEAVING = (0.3, 0.5, 0.7)
STEPWISE = f"probe, {STEP} a step"
MIN_HELD_OUT = 100
FINGERPRINT = 16
"""Tokens whose embeddings the file has."""


class HeldOut(NamedTuple):
    """Rows of the whole held-out part, with the probes' predictions."""

    predicted: np.ndarray  # float64 [C, n]
    # float64 [2, C, n], probabilities that full depth accepts a draft of the exit: of a
    # greedy request, and of one that draws its tokens
    acceptance: np.ndarray
    kl: np.ndarray
    exit_entropy: np.ndarray
    exit_nll: np.ndarray
    agrees: np.ndarray
    full_nll: np.ndarray
    lagged_entropy: np.ndarray
    overlap: np.ndarray


class Outcome(NamedTuple):
    """What a policy costs at one share of leavers."""

    leaving: float
    policy: str
    spearman: float  # of its score and the divergence
    kl: float  # summed over the leavers, a token of all
    rise: float  # of the perplexity, relative
    agreement: float
    closed: float  # of the perplexity's gap between random and oracle


class Report(NamedTuple):
    probes: Probes
    translators: list[Translator]  # one a cutoff, or none
    tokens: int  # fitted on
    untranslated: np.ndarray  # float64 [C], mean KL of the exits without
    held_out: HeldOut
    outcomes: list[list[Outcome]]  # a list a cutoff
    exits: list[Exit]  # one a cutoff
    ways: list[tuple[Drafting, Drafting]]  # a cutoff: greedy, sampled


def main(argv: list[str] | None = None) -> Report:
    args = parse_args(argv)
    config = load_config(args.model)
    check_fit(args, config)
    texts = read_texts(args)
    tokenizer = load_tokenizer(args.model)
    windows = cut(tokenizer, texts, args.context_length, args.tokens)
    fitted, held_out = split(windows, args.holdout)
    check_size(args, config.hidden_size, fitted, held_out)
    model = load_model(args.model, args.dtype, args.device)
    exits = Exits(model, args.cutoffs)

    untranslated = mean_divergence(args, exits, held_out)
    translators, probes = fit(args, exits, fitted, config.hidden_size)
    exits.translators = translators
    measured = measure(args, exits, held_out, probes)
    outcomes = [compare(measured, i) for i in range(len(args.cutoffs))]
    tokens = count(fitted)
    write(args.output, probes, translators, tokens, args.cutoffs, model)
    for_all = exits_for_all(args.cutoffs, config.num_hidden_layers, measured)
    ways = ways_to_draft(args, model, translators, measured)
    report = Report(
        probes, translators, tokens, untranslated, measured, outcomes, for_all, ways
    )
    show(args, report)
    return report


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    args = utio_options.parse_calibrate(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"--device {args.device}: {str(error).splitlines()[0]}")
    return args


def load_config(model: str):
    """The configuration of a model that has exits."""
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        sys.exit(f"--model {model}: {error}")
    if config.model_type not in FAMILIES:
        sys.exit(
            f"--model {model} is a {config.model_type}; supported are "
            f"{', '.join(FAMILIES)}"
        )
    return config


def check_cutoffs(cutoffs: list[int], config) -> None:
    layers = config.num_hidden_layers
    if cutoffs[-1] >= layers:
        sys.exit(
            f"--cutoffs {cutoffs[-1]}: the model has {layers} layers, so the last "
            f"cutoff is {layers - 1}"
        )


def check_fit(args: argparse.Namespace, config) -> None:
    check_cutoffs(args.cutoffs, config)
    longest = config.max_position_embeddings
    if args.context_length > longest:
        sys.exit(f"--context-length {args.context_length}: the model takes {longest}")


def load_model(model: str, dtype: str, device: str) -> nn.Module:
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        sys.exit(f"--model {model}: {error}")
    return loaded.to(device).eval()


def load_tokenizer(model: str):
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        sys.exit(f"--model {model}: no tokenizer: {error}")


def check_size(args, hidden: int, fitted, held_out) -> None:
    parts, what = [fitted], "to fit"
    if args.translators:
        parts, what = split(fitted, 0.5), "to fit, in halves that hold whole windows,"
    least = min(count(part) for part in parts)
    if least <= hidden or count(held_out) < MIN_HELD_OUT:
        given = " and ".join(str(count(part)) for part in parts)
        sys.exit(
            f"--tokens {args.tokens}: the text gives {given} {what} and "
            f"{count(held_out)} held out; a fit of {hidden} features takes more than "
            f"{hidden} and {MIN_HELD_OUT}. Raise --tokens or give more --text"
        )


def mean_divergence(args, exits: Exits, windows) -> np.ndarray:
    """Mean KL of each cutoff, float64 `[C]`."""
    total, tokens = np.zeros(len(args.cutoffs)), 0
    for rows in progress(exits, windows, args.batch_size, "exits"):
        check_finite(args, rows)
        total += rows.kl.sum(1)
        tokens += rows.kl.shape[1]
    return total / tokens


@torch.inference_mode()
def measure(args, exits: Exits, windows, probes) -> HeldOut:
    """Runs the held-out windows, and the probes on them."""
    parts = []
    for rows in progress(exits, windows, args.batch_size, "held out"):
        check_finite(args, rows)
        costs, greedy, sampled = (
            torch.stack([probe(x).squeeze(1) for probe, x in zip(kind, rows.features)])
            for kind in probes
        )
        acceptance = torch.stack((greedy, sampled)).double().sigmoid()
        predicted = costs.double().cpu().numpy(), acceptance.cpu().numpy()
        parts.append((*predicted, *rows[1:]))
    return HeldOut(*(np.concatenate(column, -1) for column in zip(*parts)))


def ways_to_draft(
    args, model, translators: Sequence[Translator], held_out: HeldOut
) -> list[tuple[Drafting, Drafting]]:
    """The fastest way to draft from each cutoff: greedily, and drawing tokens."""
    translator = sum(weight.numel() for weight in translators[0]) if translators else 0
    costs = draft_costs(model, args.cutoffs, translator)
    # To stop by a probe, a GPU's steps would have to wait for it: none is scheduled ahead.
    stops = args.device == "cpu"
    return [
        tuple(
            best_drafting(
                cutoff, costs[i], accepted[i].astype(float), predicted[i], stops
            )
            for accepted, predicted in zip(
                (held_out.agrees, held_out.overlap), held_out.acceptance
            )
        )
        for i, cutoff in enumerate(args.cutoffs)
    ]


def compare(held_out: HeldOut, index: int) -> list[Outcome]:
    """Lets the tokens of the lowest scores leave at the cutoff `index`.

    Random leavers are not drawn; the figures are what they come to on average.
    """
    kl = held_out.kl[index]
    exit_nll, full_nll = held_out.exit_nll[index], held_out.full_nll
    agrees = held_out.agrees[index]
    scores = {
        "random": None,
        "probe": held_out.predicted[index],
        STEPWISE: held_out.predicted[index],
        "entropy at the exit": held_out.exit_entropy[index],
        "lagged entropy": held_out.lagged_entropy,
        "oracle": kl,
    }
    outcomes = []
    for share in LEAVING:
        leavers = round(share * len(kl))
        found = []
        for name, score in scores.items():
            if score is None:
                leaves = np.full(len(kl), leavers / len(kl))
                correlation = 0.0
            else:
                leaves = np.zeros(len(kl))
                lowest = np.argsort(score, kind="stable")[:leavers]
                if name == STEPWISE:
                    lowest = lowest_by_step(score, share)
                leaves[lowest] = 1
                correlation = float(spearmanr(score, kl).statistic)
            rise = math.expm1((leaves * (exit_nll - full_nll)).mean())
            agreement = 1 - (leaves * ~agrees).mean()
            outcome = (share, name, correlation, (leaves * kl).mean(), rise, agreement)
            found.append(Outcome(*outcome, math.nan))
        worst, best = found[0].rise, found[-1].rise
        gap = worst - best if worst > best else math.nan
        outcomes += [o._replace(closed=(worst - o.rise) / gap) for o in found]
    return outcomes


def write(
    path: Path,
    probes: Probes,
    translators: Sequence[Translator],
    tokens: int,
    cutoffs: Sequence[int],
    model: nn.Module,
) -> None:
    """Puts the whole file in place at once, or leaves the old one."""
    config = model.config
    metadata = {
        "format": FORMAT,
        "cutoffs": ",".join(map(str, cutoffs)),
        "num_layers": str(config.num_hidden_layers),
        "hidden_size": str(config.hidden_size),
        "model_type": config.model_type,
        "tokens": str(tokens),
    }
    tensors = {}
    for name, fitted in zip(
        ("probe", "acceptance_greedy", "acceptance_sampled"), probes
    ):
        tensors |= {
            f"{name}_weight_1": [probe[0].weight for probe in fitted],
            f"{name}_bias_1": [probe[0].bias for probe in fitted],
            f"{name}_weight_2": [probe[2].weight[0] for probe in fitted],
            f"{name}_bias_2": [probe[2].bias[0] for probe in fitted],
        }
    if translators:
        for name in Translator._fields:
            parts = [getattr(translator, name) for translator in translators]
            tensors[f"translator_{name}"] = parts
    stacked = {name: torch.stack(t).detach().cpu() for name, t in tensors.items()}
    # By these an engine sees whether it has the same model.
    token_ids = torch.linspace(0, config.vocab_size - 1, FINGERPRINT).long()
    # As the module returns them: Gemma's are scaled.
    embedded = model.get_input_embeddings()(token_ids.to(model.device))
    embeddings = embedded.detach().cpu().float()
    stacked |= {"token_ids": token_ids, "token_embeddings": embeddings}
    data = save(stacked, metadata)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"--output {path}: {error}")


def show(args: argparse.Namespace, report: Report) -> None:
    """Prints what was fitted and a table a cutoff."""
    console = Console(width=88)
    held_out = report.held_out
    console.print(
        f"{args.model}\n"
        f"{report.tokens} tokens fitted, {len(held_out.full_nll)} held out, perplexity "
        f"{math.exp(held_out.full_nll.mean()):.4f} at full depth\n"
        "Teacher forcing with full-depth attention: leavers are scored by the exit, "
        "the other tokens by full depth.\n"
        "mean KL: the leavers' sum by all tokens; closed: how much of the gap in "
        "perplexity between random and oracle; agrees: with full depth's greedy "
        "choice.",
        highlight=False,
        soft_wrap=True,
    )
    for i, cutoff in enumerate(args.cutoffs):
        title = f"Leaving after {cutoff} layers: mean KL {held_out.kl[i].mean():.4f}"
        if report.translators:
            title += f", untranslated {report.untranslated[i]:.4f}"
        console.print(table(title, report.outcomes[i]))
        if report.translators and held_out.kl[i].mean() >= report.untranslated[i]:
            console.print(
                f"[red]The translator after {cutoff} layers makes things worse on text "
                "it was not fitted on[/]: try more --tokens, a smaller "
                "--translator-width or --no-translators.",
                soft_wrap=True,
            )
    console.print(exits_table(report.exits))
    console.print(drafts_table([exit.exit_layer for exit in report.exits], held_out))
    console.print(drafting_table(report.ways))
    best = max((sampled for _, sampled in report.ways), key=lambda way: way.speedup)
    output = str(args.output)
    for line in (
        f"Written to {output}.",
        proposal(report.exits, output),
        f"To draft, which loses nothing: {serve_options(best, output)}",
        *either(report.exits, output, serve_options(best, output, draft_gate=True)),
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def new_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )


def drafts_table(cutoffs: list[int], held_out: HeldOut) -> Table:
    result = new_table("A draft of every token, and its probe's rank correlation")
    result.add_column("exit after", justify="right")
    for kind in ("greedy", "drawn"):
        result.add_column(f"{kind}, accepted", justify="right")
        result.add_column("Spearman", justify="right")
    truth = held_out.agrees.astype(float), held_out.overlap
    for i, cutoff in enumerate(cutoffs):
        row = [str(cutoff)]
        for accepted, predicted in zip(truth, held_out.acceptance):
            known = np.ptp(accepted[i]) > 0 and np.ptp(predicted[i]) > 0
            rank = spearmanr(predicted[i], accepted[i]).statistic if known else math.nan
            row += [f"{accepted[i].mean():.3f}", f"{rank:.3f}"]
        result.add_row(*row)
    return result


def drafting_table(ways: list[tuple[Drafting, Drafting]]) -> Table:
    result = new_table("Drafting, estimated for one sequence at a time")
    result.add_column("exit after", justify="right")
    result.add_column("tokens", no_wrap=True)
    for column in ("drafts", "least chance", "accepted", "tokens a round", "speed-up"):
        result.add_column(column, justify="right")
    for pair in ways:
        for name, way in zip(("greedy", "drawn"), pair):
            result.add_row(
                str(way.exit_layer) if name == "greedy" else "",
                name,
                f"at most {way.num_drafts}",
                f"{way.min_acceptance:g}",
                f"{way.accepted:.2f}",
                f"{way.tokens:.2f}",
                f"{way.speedup:.2f}",
            )
    return result


def table(title: str, outcomes: list[Outcome]) -> Table:
    result = new_table(title)
    result.add_column("leaving", justify="right")
    result.add_column("policy", no_wrap=True)
    for column in ("Spearman", "mean KL", "perplexity", "agrees", "closed"):
        result.add_column(column, justify="right")
    for i, outcome in enumerate(outcomes):
        first = i == 0 or outcome.leaving != outcomes[i - 1].leaving
        last = i + 1 < len(outcomes) and outcome.leaving != outcomes[i + 1].leaving
        result.add_row(
            f"{outcome.leaving:.0%}" if first else "",
            outcome.policy,
            f"{outcome.spearman:.3f}" if outcome.policy != "random" else "",
            f"{outcome.kl:.4f}",
            f"{outcome.rise:+.2%}",
            f"{outcome.agreement:.4f}",
            f"{outcome.closed:.1%}",
            end_section=last,
        )
    return result


if __name__ == "__main__":
    with interruptible():
        main()
