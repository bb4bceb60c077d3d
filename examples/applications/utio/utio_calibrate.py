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
gradient descent: probes by least squares, acceptance probes by cross-entropy,
translators to the divergence of what the final norm and the head make of them, from a
ridge regression on. What they are fitted
to lies in scratch files beside the output: two bytes a number, token and cutoff, and
four for full depth. Translators do better on text that they are fitted to than on other
text. So what probes are fitted to comes from two translators more, each fitted to one
half of the text and asked about the other (cross-fitting).

The figures printed are of a part of the text that nothing was fitted to. They are
teacher forcing with full-depth attention: every token attends to keys and values that
full depth wrote. Routed decoding also pays for what leavers write. Leavers are picked
over the whole part, as by a threshold, but for "probe, 32 a step": there each step of
32 tokens, drawn from the part, lets its share go, as serving does.

The last two tables say what it costs to let every token leave at an exit (utio_exits.py)
and what drafting with it would gain (utio_drafting.py); the last lines, how to serve both.

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
import io
import math
import os
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2]
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "applications")]

import utio_options
from common import quiet
from common.program import interruptible
from compare.texts import PIECE, Encoder, encode_stream
from utio_options import FAMILIES

if __name__ == "__main__":  # says --help and mistakes before torch is imported
    utio_options.parse_calibrate()
    quiet.hush()

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
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

FORMAT = "utio-calibration-2"
RMS_EPSILON = 1e-6
STRENGTH = 1e-4
"""Of the ridge regressions, a token; the features' own mean square is 1."""
EPOCHS = 8
RATE = 0.5
"""Learning rate times the inputs of a layer, so that widths need no rate of their own."""
DECAY = 0.05
BATCH = 256
SOME = 4096
"""Tokens that say whether descent was any good."""
LEAVING = (0.3, 0.5, 0.7)
STEPWISE = f"probe, {STEP} a step"
MIN_TEXTS = 100
"""No text gives more than this part of the tokens while others still have some."""
MIN_HELD_OUT = 100
ACCEPTANCE_WIDTH = 64
"""Units of the probes that predict acceptance, at most."""
FINGERPRINT = 16
"""Tokens whose embeddings the file has."""
BAR = {"leave": False, "disable": None}
"""Of progress bars: none where the output is no terminal."""
LOGITS_AT_ONCE = 2**22
"""Elements of one block of logits; a few such blocks are held at a time."""


class Rows(NamedTuple):
    """The tokens of one window; C cutoffs, n tokens."""

    features: torch.Tensor  # float32 [C, n, hidden], on the model's device
    kl: np.ndarray  # float64 [C, n], full depth against the exit, nats
    exit_entropy: np.ndarray  # float64 [C, n]
    exit_nll: np.ndarray  # float64 [C, n], of the token that comes next
    agrees: np.ndarray  # bool [C, n], with full depth's greedy choice
    full_nll: np.ndarray  # float64 [n]
    lagged_entropy: np.ndarray  # float64 [n], full depth, from the token before
    overlap: np.ndarray  # float64 [C, n], of the two distributions, from 0 to 1


class HeldOut(NamedTuple):
    """The same of the whole held-out part, with the probes' predictions."""

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


class Translator(NamedTuple):
    """Makes features of the last layer's state out of those at a cutoff; float32."""

    weight: torch.Tensor  # [hidden, hidden]
    bias: torch.Tensor  # [hidden]
    weight_1: torch.Tensor  # [width, hidden]
    bias_1: torch.Tensor  # [width]
    weight_2: torch.Tensor  # [hidden, width]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(F.linear(features, self.weight_1, self.bias_1))
        linear = F.linear(features, self.weight, self.bias)
        return linear + F.linear(inner, self.weight_2)


class Outcome(NamedTuple):
    """What a policy costs at one share of leavers."""

    leaving: float
    policy: str
    spearman: float  # of its score and the divergence
    kl: float  # summed over the leavers, a token of all
    rise: float  # of the perplexity, relative
    agreement: float
    closed: float  # of the perplexity's gap between random and oracle


class Probes(NamedTuple):
    """One a cutoff of each."""

    costs: list[nn.Sequential]
    greedy: list[nn.Sequential]  # logits of `agrees`
    sampled: list[nn.Sequential]  # logits of `overlap`


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
    ways = ways_to_draft(args, model, measured)
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


Text = Path | str
"""A file, which is read as a stream, or the text itself."""


def read_texts(args: argparse.Namespace, held_out: bool = False) -> list[Text]:
    """The texts that the options name, none of them blank.

    Args:
        held_out: of the archive, the files that the reference model has not seen.
    """
    if args.text is None:
        print("No --text: reading vLLM's Python and Markdown", file=sys.stderr)
        if not args.archive.is_file():
            sys.exit(f"--archive {args.archive}: no such file; or name a --text")
        sys.path.insert(0, str(EXAMPLES / "reference_model"))
        from corpus import read

        try:
            return list(read(args.archive, held_out).values())
        except (OSError, EOFError, tarfile.TarError) as error:
            sys.exit(f"--archive {args.archive}: {error}")
    texts: list[Text] = []
    for path in args.text:
        if path.is_dir():
            texts += read_folder(path)
            continue
        try:
            texts += [path] * has_words(path)
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"--text {path}: {error}")
    if not texts:
        sys.exit(f"--text {' '.join(map(str, args.text))}: nothing but blanks")
    return texts


def read_folder(folder: Path) -> list[Path]:
    """Its UTF-8 files that are not blank, those of visible folders below it as well."""
    texts, found = [], False
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        try:
            texts += [path] * has_words(path)
            found = True
        except UnicodeDecodeError:
            continue  # a picture or the like
        except OSError as error:
            sys.exit(f"--text {folder}: {error}")
    if not found:
        sys.exit(f"--text {folder}: no UTF-8 file in this folder")
    return texts


def chunks_of(text: Text) -> Iterator[str]:
    """The text in parts of at most `PIECE` characters, its line ends as they are."""
    opened = io.StringIO(text, newline="") if isinstance(text, str) else text.open(
        encoding="utf-8", newline=""
    )  # fmt: skip
    with opened as file:
        while chunk := file.read(PIECE):
            yield chunk


def has_words(path: Path) -> bool:
    """Says whether a file is more than blanks.

    Raises:
        UnicodeDecodeError: some part of it is not UTF-8.
    """
    return any([not chunk.isspace() for chunk in chunks_of(path)])  # reads all of it


def usable(window: Sequence[int]) -> int:
    """Tokens of a window that have one before them and one after."""
    return max(len(window) - 2, 0)


def count(windows: Sequence[Sequence[int]]) -> int:
    return sum(map(usable, windows))


def cut(tokenizer, texts: Sequence[Text], context: int, tokens: int) -> list[list[int]]:
    """Windows of the texts in random order, those of a text together.

    Each begins as the tokenizer begins a text. Windows of the same text do not
    overlap. Holds no more than some `tokens` tokens of a text and of all of them.

    Returns:
        Up to `tokens` usable tokens.
    """
    generator = random.Random(0)
    encoder = Encoder(tokenizer, special_tokens=False)
    prefix = tokenizer.encode("")
    most = math.ceil(tokens / MIN_TEXTS / (context - 2))
    enough = math.ceil(tokens / (context - 2)) + 1
    first: list[tuple[int, list[int]]] = []
    spare: list[tuple[int, list[int]]] = []
    found, room = 0, tokens
    order = generator.sample(range(len(texts)), len(texts))
    for rank, index in enumerate(order):
        ids = encode_stream(encoder, chunks_of(texts[index]))
        parts = (prefix + part for part in parts_of(ids, context - len(prefix)))
        windows = draw((part for part in parts if usable(part)), enough, generator)
        generator.shuffle(windows)
        first += [(rank, window) for window in windows[:most]]
        for window in windows[most:]:
            if room > 0:
                spare.append((rank, window))
                room -= usable(window)
        found += count(windows[:most])
        if found >= tokens:
            break
    chosen = []
    for rank, window in first + spare:
        if tokens <= 0:
            break
        chosen.append((rank, window[: tokens + 2]))
        tokens -= usable(window)
    return [window for _, window in sorted(chosen, key=lambda pair: pair[0])]


def parts_of(pieces: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Parts of `size` tokens of a stream of them; the last may be shorter."""
    held: list[int] = []
    for piece in pieces:
        held += piece
        whole = len(held) - len(held) % size
        yield from (held[i : i + size] for i in range(0, whole, size))
        del held[:whole]
    if held:
        yield held


def draw(
    windows: Iterable[list[int]], most: int, generator: random.Random
) -> list[list[int]]:
    """All windows if they are at most `most`, else so many, each as likely as any other
    (algorithm R: Vitter, ACM Trans. Math. Softw. 11, 1985)."""
    drawn: list[list[int]] = []
    for number, window in enumerate(windows):
        if number < most:
            drawn.append(window)
        elif (place := generator.randrange(number + 1)) < most:
            drawn[place] = window
    return drawn


def split(
    windows: list[list[int]], holdout: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Holds the last windows out, so that at most one text is on both sides."""
    wanted = holdout * count(windows)
    first = len(windows)
    while count(windows[first:]) < wanted:
        first -= 1
    return windows[:first], windows[first:]


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


def check_finite(args: argparse.Namespace, rows: Rows) -> None:
    if not np.isfinite(rows.kl).all() or not rows.features.isfinite().all():
        refuse_overflow(args)


def refuse_overflow(args: argparse.Namespace) -> None:
    sys.exit(f"--dtype {args.dtype}: the model's states or logits overflow")


class Exits:
    """A causal model with exits after some of its layers.

    Args:
        model: a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3 or OPT of Transformers.
        cutoffs: numbers of layers, from 1 to one less than the model has.
    """

    def __init__(self, model: nn.Module, cutoffs: Sequence[int]):
        self._model = model.requires_grad_(False)
        decoder = getattr(model.model, "decoder", model.model)
        self._decoder = decoder
        if decoder is model.model:
            tail = [decoder.norm]
        else:  # OPT; 350m has no final norm, most have no projection
            tail = [decoder.final_layer_norm, decoder.project_out]
        self._tail = [module for module in tail if module is not None]
        self._states: dict[int, torch.Tensor] = {}
        self._cutoffs = cutoffs
        self._last = len(decoder.layers)
        self.translators: list[Translator] = []  # one a cutoff, or none
        for cutoff in (*cutoffs, self._last):
            decoder.layers[cutoff - 1].register_forward_hook(self._keep(cutoff))

    def _keep(self, cutoff: int):
        def hook(module, inputs, output) -> None:
            is_tuple = isinstance(output, tuple)
            self._states[cutoff] = output[0] if is_tuple else output

        return hook

    def rows(self, windows: list[list[int]], batch_size: int) -> Iterator[Rows]:
        """The usable tokens of each window, in order."""
        for full, states, _, ids in self._run(windows, batch_size):
            yield self._window(full, states, ids)

    def samples(
        self, windows: list[list[int]], batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of the usable tokens of each window: features at the cutoffs, float32 [C, n,
        hidden]; those after the last layer, [n, hidden], or the states as they are where
        no norm follows; and what the head then takes, [n, size]."""
        normed = any("norm" in type(module).__name__.lower() for module in self._tail)
        for full, states, last, _ in self._run(windows, batch_size):
            ends = features(last) if normed else last.float()
            at_cutoffs = torch.stack([features(state[1:]) for state in states])
            yield at_cutoffs, ends[1:], full[1:].float()

    def divergence(self, full: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """KL in nats, `[n]`, of what the final norm and the head make of features from
        what the head makes of `full`."""
        head = self._model.get_output_embeddings()
        x = features.to(head.weight.dtype)
        for module in self._tail:
            x = module(x)
        p = head(full.to(x.dtype)).float().log_softmax(-1)
        q = head(x).float().log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    @property
    def rows_at_once(self) -> int:
        """Tokens whose logits may be held."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        return max(LOGITS_AT_ONCE // vocabulary, 1)

    @torch.inference_mode()
    def _run(self, windows: list[list[int]], batch_size: int):
        """Of each window: the decoder's output, the states at the cutoffs and after
        the last layer, and the tokens that follow."""
        device = self._model.device
        for begin in range(0, len(windows), batch_size):
            batch = windows[begin : begin + batch_size]
            # Filled up on the right, where causal attention does not look.
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
            for row, window in zip(ids, batch):
                row[: len(window)] = torch.tensor(window)
            ids = ids.to(device)
            full = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            for i, window in enumerate(batch):
                end = len(window) - 1
                states = [self._states[cutoff][i, :end] for cutoff in self._cutoffs]
                last = self._states[self._last][i, :end]
                yield full[i, :end], states, last, ids[i, 1 : end + 1]
            self._states.clear()

    @torch.inference_mode()
    def _window(self, full, states, following) -> Rows:
        head = self._model.get_output_embeddings()
        step = self.rows_at_once
        parts = []
        for begin in range(0, len(following), step):
            rows = slice(begin, begin + step)
            next_ids = following[rows, None]
            p = head(full[rows]).float().log_softmax(-1)
            base = [entropy(p), -p.gather(-1, next_ids)[:, 0]]
            leaving = []
            for index, state in enumerate(states):
                x = state[rows]
                if self.translators:
                    x = self.translators[index](features(x)).to(x.dtype)
                for module in self._tail:
                    x = module(x)
                q = head(x).float().log_softmax(-1)
                kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
                agrees = p.argmax(-1) == q.argmax(-1)
                nll = -q.gather(-1, next_ids)[:, 0]
                overlap = torch.minimum(p, q).exp().sum(-1)
                leaving.append(torch.stack([kl, entropy(q), nll, agrees, overlap]))
            parts.append((torch.stack(base), torch.stack(leaving)))
        base = torch.cat([part[0] for part in parts], -1).double().cpu().numpy()
        leaving = torch.cat([part[1] for part in parts], -1).double().cpu().numpy()
        kl, exit_entropy, exit_nll, agrees, overlap = leaving[:, :, 1:].swapaxes(0, 1)
        return Rows(
            features=torch.stack([features(state[1:]) for state in states]),
            kl=kl,
            exit_entropy=exit_entropy,
            exit_nll=exit_nll,
            agrees=agrees.astype(bool),
            full_nll=base[1, 1:],
            lagged_entropy=base[0, :-1],
            overlap=overlap,
        )


def features(states: torch.Tensor) -> torch.Tensor:
    """float32 of the states' shape: each divided by its root mean square."""
    x = states.float()
    return x / (x.square().mean(-1, keepdim=True) + RMS_EPSILON).sqrt()


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def progress(exits: Exits, windows, batch_size: int, name: str) -> Iterator[Rows]:
    with tqdm(total=count(windows), desc=name, unit="tok", **BAR) as bar:
        for rows in exits.rows(windows, batch_size):
            yield rows
            bar.update(len(rows.full_nll))


class NormalEquations:
    """Sums of a least-squares fit, in float64, as tokens come by."""

    def __init__(self, size: int, outputs: int):
        self.count = 0
        self._x = torch.zeros(size, dtype=torch.float64)
        self._y = torch.zeros(outputs, dtype=torch.float64)
        self._xx = torch.zeros(size, size, dtype=torch.float64)
        self._xy = torch.zeros(size, outputs, dtype=torch.float64)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Takes in features `[n, size]` and targets `[n, outputs]`."""
        x, y = x.double(), y.to(x.device).double()
        if self._xx.device != x.device:
            self._x, self._y, self._xx, self._xy = (
                sums.to(x.device) for sums in (self._x, self._y, self._xx, self._xy)
            )
        self.count += len(x)
        self._x += x.sum(0)
        self._y += y.sum(0)
        self._xx += x.T @ x
        self._xy += x.T @ y

    def solve(self, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Minimises the mean square error + strength * |weight|², the intercept free.

        Returns:
            Weights float64 `[size, outputs]` and intercepts `[outputs]`.
        """
        mean, mean_y = self._x / self.count, self._y / self.count
        centred = self._xx / self.count - torch.outer(mean, mean)
        moment = self._xy / self.count - torch.outer(mean, mean_y)
        centred.diagonal().add_(strength)
        weight = torch.linalg.solve(centred, moment)
        return weight, mean_y - mean @ weight


def mean_divergence(args, exits: Exits, windows) -> np.ndarray:
    """Mean KL of each cutoff, float64 `[C]`."""
    total, tokens = np.zeros(len(args.cutoffs)), 0
    for rows in progress(exits, windows, args.batch_size, "exits"):
        check_finite(args, rows)
        total += rows.kl.sum(1)
        tokens += rows.kl.shape[1]
    return total / tokens


def fit(
    args, exits: Exits, windows, hidden_size: int
) -> tuple[list[Translator], Probes]:
    """Translators, and probes of what leaving with them costs on text that they have
    not seen: of each half of the windows, with translators fitted to the other half."""
    if not args.translators:
        return [], fit_probes(args, exits, [(windows, [])], hidden_size)
    first, second = split(windows, 0.5)
    unseen = [
        (first, fit_translators(args, exits, second, hidden_size)),
        (second, fit_translators(args, exits, first, hidden_size)),
    ]
    probes = fit_probes(args, exits, unseen, hidden_size)
    return fit_translators(args, exits, windows, hidden_size), probes


def fit_translators(args, exits: Exits, windows, hidden_size: int) -> list[Translator]:
    size, width = count(windows), args.translator_width or hidden_size
    xs = scratch(args, (len(args.cutoffs), size, hidden_size), np.float16)
    fulls, filled = None, 0
    equations = [NormalEquations(hidden_size, hidden_size) for _ in args.cutoffs]
    with tqdm(total=size, desc="states", unit="tok", **BAR) as bar:
        for at_cutoffs, ends, full in exits.samples(windows, args.batch_size):
            if not at_cutoffs.isfinite().all() or not full.isfinite().all():
                refuse_overflow(args)
            if fulls is None:
                fulls = scratch(args, (size, full.shape[1]), np.float32)
            new = slice(filled, filled + len(full))
            xs[:, new], fulls[new] = at_cutoffs.cpu().numpy(), full.cpu().numpy()
            for sums, x in zip(equations, at_cutoffs):
                sums.add(x, ends)
            filled = new.stop
            bar.update(len(full))
    return [
        fit_translator(exits, x, fulls, sums, width, args.device)
        for x, sums in zip(xs, equations)
    ]


def fit_translator(
    exits: Exits,
    x: np.ndarray,
    full: np.ndarray,
    linear: NormalEquations,
    width: int,
    device: str,
) -> Translator:
    """The least divergence from full depth.

    Args:
        x: features `[n, hidden]`.
        full: what the head takes at full depth, `[n, size]`.
        linear: gives the map to begin with.
    """
    weight, bias = linear.solve(STRENGTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Linear(x.shape[1], width)
    start = weight.T, bias, first.weight, first.bias, torch.zeros(len(weight), width)
    tensors = [
        tensor.detach().to(device, torch.float32).requires_grad_() for tensor in start
    ]
    translator = Translator(*tensors)

    def loss(rows: np.ndarray) -> torch.Tensor:
        inputs = torch.from_numpy(x[rows]).to(device).float()
        return exits.divergence(
            torch.from_numpy(full[rows]).to(device), translator(inputs)
        )

    groups = [
        {"params": tensors[:4], "lr": RATE / x.shape[1]},
        {"params": tensors[4:], "lr": RATE / width},
    ]
    at_once = exits.rows_at_once
    some = np.random.default_rng(0).choice(len(x), min(len(x), SOME), replace=False)

    @torch.no_grad()
    def mean_loss() -> float:
        parts = [some[i : i + at_once] for i in range(0, len(some), at_once)]
        return sum(loss(part).sum().item() for part in parts) / len(some)

    before, begun_with = mean_loss(), [tensor.detach().clone() for tensor in tensors]
    descend("translator", groups, len(x), loss, at_once)
    # Where a linear map is nearly right, steps can lead away from it.
    if not mean_loss() < before:
        return Translator(*begun_with)
    return Translator(*(tensor.detach() for tensor in tensors))


def fit_probes(
    args,
    exits: Exits,
    parts: Sequence[tuple[list[list[int]], list[Translator]]],
    hidden_size: int,
) -> Probes:
    """
    Args:
        parts: windows, and the translators with which their tokens leave.
    """
    size = sum(count(windows) for windows, _ in parts)
    shape = len(args.cutoffs), size, hidden_size
    xs, filled = scratch(args, shape, np.float16), 0
    costs, agrees, overlap = np.empty((3, *shape[:2]))
    for windows, translators in parts:
        exits.translators = translators
        for rows in progress(exits, windows, args.batch_size, "costs"):
            check_finite(args, rows)
            new = slice(filled, filled + rows.kl.shape[1])
            xs[:, new] = rows.features.cpu().numpy()
            costs[:, new] = np.sqrt(rows.kl)
            agrees[:, new], overlap[:, new] = rows.agrees, rows.overlap
            filled = new.stop
    wide, narrow = args.probe_width, min(args.probe_width, ACCEPTANCE_WIDTH)
    return Probes(
        costs=[fit_probe(x, y, wide, args.device) for x, y in zip(xs, costs)],
        greedy=[fit_probe(x, y, narrow, args.device, True) for x, y in zip(xs, agrees)],
        sampled=[
            fit_probe(x, y, narrow, args.device, True) for x, y in zip(xs, overlap)
        ],
    )


def fit_probe(
    x: np.ndarray, y: np.ndarray, width: int, device: str, is_chance: bool = False
) -> nn.Sequential:
    """Fits targets `[n]` from features `[n, hidden]`: by least squares, or, where they
    are probabilities, their logits by cross-entropy."""
    target = torch.from_numpy(y).float()
    mean, spread = torch.zeros(()), torch.ones(())
    if not is_chance:
        mean, spread = target.mean(), target.std().clamp(min=1e-6)
    target = (target - mean) / spread
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Linear(x.shape[1], width), nn.Linear(width, 1)
    probe = nn.Sequential(first, nn.GELU(), last).to(device)

    def loss(rows: np.ndarray) -> torch.Tensor:
        inputs = torch.from_numpy(x[rows]).to(device).float()
        outputs, wanted = probe(inputs).squeeze(1), target[rows].to(device)
        if is_chance:
            return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return (outputs - wanted).square()

    groups = [
        {"params": layer.parameters(), "lr": RATE / layer.in_features}
        for layer in (first, last)
    ]
    descend("probe", groups, len(x), loss, BATCH)
    with torch.no_grad():
        last.weight.mul_(spread)
        last.bias.mul_(spread).add_(mean)
    return probe


def descend(
    name: str,
    groups: list[dict],
    size: int,
    loss: Callable[[np.ndarray], torch.Tensor],
    at_once: int,
) -> None:
    """Fits the parameters in `groups` to `size` samples.

    Args:
        loss: of samples by their indices, `[n]`; of not more than `at_once`.
    """
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(size) for _ in range(EPOCHS)])
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=len(batches)
    )
    for batch in tqdm(batches, desc=name, unit="step", **BAR):
        optimizer.zero_grad()
        for begin in range(0, len(batch), at_once):
            (loss(batch[begin : begin + at_once]).sum() / len(batch)).backward()
        optimizer.step()
        schedule.step()


def scratch(args, shape: tuple[int, ...], dtype: type[np.floating]) -> np.ndarray:
    """An array in a file beside the output, which goes with it."""
    try:
        with tempfile.TemporaryFile(dir=args.output.parent) as file:
            # Now, not when a page of it is written, which a full disk would end.
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * dtype().itemsize)
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        sys.exit(f"--output {args.output}: no scratch file beside it: {error}")


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


def ways_to_draft(args, model, held_out: HeldOut) -> list[tuple[Drafting, Drafting]]:
    """The fastest way to draft from each cutoff: greedily, and drawing tokens."""
    costs = draft_costs(model, args.cutoffs, args.translators)
    return [
        tuple(
            best_drafting(cutoff, costs[i], accepted[i].astype(float), predicted[i])
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


def drafting_table(ways: list[tuple[Drafting, Drafting]]) -> Table:
    result = Table(
        title="Drafting, estimated for one sequence at a time",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
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
    result = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
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
