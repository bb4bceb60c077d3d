# SPDX-License-Identifier: Apache-2.0
"""What routing by depth saves and what it costs, for a model and a text.

    .venv/bin/python examples/utio_tradeoff.py --calibration probe.safetensors --output plot.png
    .venv/bin/python examples/utio_tradeoff.py --model facebook/opt-125m --cutoffs 4 6 8 \\
        --text book.txt --leaving 0.3 0.5

Each way of routing is run at each early exit with each share of leavers, one exit at a
time, beside all tokens leaving there and none; and with each `--mix` of several exits.

Cost: held-out text is forced through routed decoding, token by token, in a batch, and
the log-probability that the model gave each forced token is recorded. A wrong step does
not change what comes after it, except through the keys and values that leavers write,
which is part of the cost. Agreement is with the greedy choice at full depth.

Gain: the same batch generates freely, in turn with routing and with `max_depth` at all
layers, which exempts requests from it, in the same engine. The ratio is of the time from
the step in which the last one has its first token, the median of neighbours.

Ways: random; tis, the score known before a step; probe, of a calibration made by
utio_calibrate.py; oracle, which knows the true divergence of each token's exit from full
depth (by teacher forcing on Transformers). The oracle can not be had; how much of the
gap between random and oracle a way closes says how good it is.
"""

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

EXAMPLES = Path(__file__).parent
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Policies and the text that is forced are shared with the engine: one process, and the
# model runner that takes logits processors.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
sys.path.insert(0, str(EXAMPLES))

import utio_options
from common import quiet
from common.program import interruptible
from utio_options import ORACLE, PROBE, RANDOM, TIS

if __name__ == "__main__":  # says --help and mistakes before vLLM is imported
    utio_options.parse_tradeoff()
    quiet.hush()

import numpy as np
import torch
import utio_calibrate as calibrate
from rich import box
from rich.console import Console
from rich.table import Table
from score_perplexity import new_engine
from tqdm import tqdm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.layers.depth.calibration import load_calibration
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.depth.policy import (
    CalibratedProbe,
    CutoffPolicy,
    DepthPolicy,
)

UNIFORM, FULL = "all tokens", "full depth"


class ForcedTokens(AdapterLogitsProcessor):
    """Makes a request generate the tokens in its `extra_args["forced"]`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output_ids)]
            logits.fill_(-torch.inf)
            logits[token] = 0.0
            return logits

        return force


class Chosen:
    """What the engine's policy does now."""

    way = RANDOM
    shares: list[float] = []  # that leave at each cutoff
    generator = torch.Generator()
    # Of the oracle: nats [steps], by request and cutoff; how far each request is.
    divergence: dict[tuple[str, int], np.ndarray] = {}
    steps: Counter[str] = Counter()
    last: dict[str, int] = {}  # cutoff at which it was scored

    @classmethod
    def set(cls, way: str, shares: Sequence[float]) -> None:
        cls.way, cls.shares = way, list(shares)
        cls.generator.manual_seed(0)
        cls.forget()

    @classmethod
    def forget(cls) -> None:
        """Of requests before."""
        cls.steps.clear()
        cls.last.clear()


class BeforeTheStep(DepthPolicy):
    """Random routing, or by the token importance score."""

    def assign(self, scores: torch.Tensor, req_ids: Sequence[str]):
        if Chosen.way == RANDOM:
            scores = torch.rand(len(req_ids), generator=Chosen.generator)
        ends = np.round(np.cumsum([0, *Chosen.shares]) * len(req_ids)).astype(int)
        return scores.argsort(descending=True, stable=True), np.diff(ends).tolist()


class AtTheCutoff(CutoffPolicy):
    """By a probe, or by the true divergence."""

    def __init__(self, config):
        super().__init__(config)
        AtTheCutoff.newest = self
        self.probe = CalibratedProbe(config) if config.calibration else None

    def score(self, cutoff, states, req_indices, req_ids):
        if Chosen.way == PROBE:
            return self.probe.score(cutoff, states, req_indices, req_ids)
        scores = []
        for index in req_indices.tolist():
            # The engine appends eight characters to the ids that it is given.
            name = req_ids[index].rpartition("-")[0]
            known = Chosen.divergence.get((name, cutoff), (0.0,))
            # A step goes up through the cutoffs, those at which none leaves left out.
            Chosen.steps[name] += cutoff <= Chosen.last.get(name, cutoff)
            Chosen.last[name] = cutoff
            scores.append(known[min(Chosen.steps[name], len(known)) - 1])
        return torch.tensor(scores, dtype=torch.float32, device=states.device)


@dataclass
class Point:
    """One way of routing."""

    way: str
    exits: tuple[int, ...]  # after how many layers
    leaving: tuple[float, ...]  # share of the tokens at each
    mean_depth: float  # share of all layers
    perplexity: float
    rise: float  # of the perplexity, relative
    agreement: float
    speedup: float


def main(argv: list[str] | None = None) -> list[Point]:
    args = utio_options.parse_tradeoff(argv)
    config = calibrate.load_config(args.model)
    args.cutoffs = args.cutoffs or [config.num_hidden_layers // 2]
    calibrate.check_cutoffs(args.cutoffs, config)
    length = args.prompt_length + args.forced_length + args.speed_tokens
    if length > config.max_position_embeddings:
        sys.exit(
            f"--prompt-length, --forced-length and --speed-tokens are {length} tokens; "
            f"the model takes {config.max_position_embeddings}"
        )
    sweep = Sweep(args, config.num_hidden_layers)
    try:
        sweep.run()
    except KeyboardInterrupt:
        print("interrupted; what there is:", file=sys.stderr)
    if not sweep.points:
        sys.exit("nothing was measured")
    show(sweep)
    if args.csv:
        write_csv(args.csv, sweep.points)
    if args.output:
        draw(args.output, sweep)
    return sweep.points


class Sweep:
    """Runs the ways of routing, and keeps what came of them."""

    def __init__(self, args: argparse.Namespace, num_layers: int):
        self.args = args
        self.num_layers = num_layers
        self.windows = read_windows(args)
        self.points: list[Point] = []
        # Nats a token of each sequence, [sequences], by way, exits and leaving.
        self.losses: dict[tuple, np.ndarray] = {}
        self.engines: list[LLM] = []  # of which none may be collected before the others
        self.base = 0.0  # perplexity at full depth

    def run(self) -> None:
        args = self.args
        early = [way for way in args.ways if way in (RANDOM, TIS)]
        late = [way for way in args.ways if way in (PROBE, ORACLE)]
        llm = self.engine(BeforeTheStep)  # which refuses what does not fit the model
        if ORACLE in late:
            Chosen.divergence = self.divergences()
        exits = tuple(args.cutoffs)
        plans = [((cutoff,), (s,)) for cutoff in exits for s in args.leaving]
        plans += [(exits, shares) for shares in args.mix]
        total = 1 + len(exits) + len(plans) * len(args.ways)
        with tqdm(total=total, unit="way", disable=None) as bar:
            Chosen.set(RANDOM, self.shares((), ()))
            logprobs, self.greedy, _ = self.force(llm, max_depth=self.num_layers)
            self.base = math.exp(-logprobs.mean())
            bar.update()
            for cutoff in exits:
                measured = self.force(llm, max_depth=cutoff)
                self.add(llm, UNIFORM, (cutoff,), (1.0,), measured, max_depth=cutoff)
                bar.update()
            for ways, policy in ((early, BeforeTheStep), (late, AtTheCutoff)):
                if not ways:
                    continue
                if policy is AtTheCutoff:
                    llm = self.engine(policy)
                for plan in plans:
                    for way in ways:
                        Chosen.set(way, self.shares(*plan))
                        if policy is AtTheCutoff:
                            policy.newest.config.bucket_shares = Chosen.shares
                        self.add(llm, way, *plan, self.force(llm))
                        bar.update()

    def shares(self, exits: Sequence[int], leaving: Sequence[float]) -> list[float]:
        """Of each of the engine's cutoffs."""
        known = dict(zip(exits, leaving))
        early = [known.get(cutoff, 0.0) for cutoff in self.args.cutoffs]
        return [*early, 1 - sum(early)]

    def engine(self, policy: type) -> LLM:
        args = self.args
        options = {}
        if args.calibration:
            options["utio_calibration"] = str(args.calibration)
        llm = new_engine(
            "--prompt-length, --forced-length and --speed-tokens",
            model=args.model,
            dtype=args.dtype,
            enforce_eager=args.enforce_eager,
            max_num_seqs=args.sequences,
            max_model_len=self.windows.shape[1] + args.speed_tokens,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            logits_processors=[ForcedTokens],
            seed=0,
            enable_utio=True,
            utio_bucket_cutoffs=args.cutoffs,
            utio_min_batch_size=1,
            utio_gate=False,
            utio_policy=f"{policy.__module__}.{policy.__qualname__}",
            **options,
        )
        self.engines.append(llm)
        cache = llm.llm_engine.vllm_config.cache_config
        # One block is never given to requests.
        blocks = math.ceil(llm.model_config.max_model_len / cache.block_size)
        needed = args.sequences * blocks + 1
        if cache.num_gpu_blocks < needed:
            # Preempted ones would go on at full depth.
            least = math.ceil(args.kv_cache_memory_bytes / cache.num_gpu_blocks * needed)
            sys.exit(
                f"--kv-cache-memory-bytes {args.kv_cache_memory_bytes}: --sequences "
                f"{args.sequences} decode at once, which takes {least}"
            )
        return llm

    def divergences(self) -> dict[tuple[str, int], np.ndarray]:
        """KL(full depth || exit) of each decode step by request and cutoff, nats."""
        args = self.args
        model = calibrate.load_model(args.model, args.dtype, "cpu")
        exits = calibrate.Exits(model, args.cutoffs)
        if args.calibration:
            cutoffs = [*args.cutoffs, self.num_layers]
            try:
                loaded = load_calibration(str(args.calibration), cutoffs).translators
            except ValueError as error:
                sys.exit(f"--calibration: {error}")
            if loaded:
                exits.translators = [
                    calibrate.Translator(*loaded[cutoff]) for cutoff in args.cutoffs
                ]
        found = {}
        windows = self.windows.tolist()
        for n, rows in enumerate(calibrate.progress(exits, windows, 8, "oracle")):
            for cutoff, kl in zip(args.cutoffs, rows.kl):
                # Row 0 is the window's second token; the first decode step runs the
                # first forced one.
                found[f"{n}", cutoff] = kl[args.prompt_length - 1 :]
        return found

    def force(self, llm: LLM, max_depth: int | None = None):
        """Decodes the windows.

        Returns:
            Log-probability of each forced token and the most probable one, float64 and
            int64 `[sequences, decode steps]`, and the mean share of the layers.
        """
        forced = self.windows[:, self.args.prompt_length :]
        outputs = self.generate(
            llm,
            [
                SamplingParams(
                    max_tokens=forced.shape[1],
                    temperature=0.0,
                    ignore_eos=True,
                    logprobs=1,
                    detokenize=False,
                    extra_args={"forced": row.tolist()},
                    max_depth=max_depth,
                )
                for row in forced
            ],
        )
        logprobs = np.empty(forced.shape)
        greedy = np.empty(forced.shape, dtype=np.int64)
        for row, output in enumerate(outputs):
            assert list(output.token_ids) == forced[row].tolist()
            for column, found in enumerate(output.logprobs):
                logprobs[row, column] = found[forced[row, column]].logprob
                greedy[row, column] = next(t for t, lp in found.items() if lp.rank == 1)
        depth = np.mean([output.mean_decode_depth for output in outputs])
        # The first token comes from the prompt, at full depth.
        return logprobs[:, 1:], greedy[:, 1:], depth / self.num_layers

    def generate(self, llm: LLM, params: list[SamplingParams]) -> list:
        """The completions, and in `decoding` the seconds since all had a token.

        Requests are named by their numbers, all decode at once.
        """
        Chosen.forget()
        engine = llm.llm_engine
        for n, (window, own) in enumerate(zip(self.windows, params)):
            ids = window[: self.args.prompt_length].tolist()
            engine.add_request(f"{n}", TokensPrompt(prompt_token_ids=ids), own)
        done, begun, started = {}, set(), 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                begun.add(output.request_id)
                if output.finished:
                    done[int(output.request_id)] = output.outputs[0]
            if not started and len(begun) == len(params):
                started = time.perf_counter()
        self.decoding = time.perf_counter() - started
        return [done[n] for n in range(len(params))]

    def add(self, llm, way, exits, leaving, measured, max_depth=None) -> None:
        logprobs, greedy, depth = measured
        perplexity = math.exp(-logprobs.mean())
        self.losses[way, exits, leaving] = -logprobs.mean(1)
        self.points.append(
            Point(
                way,
                exits,
                leaving,
                depth,
                perplexity,
                perplexity / self.base - 1,
                float((greedy == self.greedy).mean()),
                self.speedup(llm, max_depth),
            )
        )

    def speedup(self, llm: LLM, max_depth: int | None) -> float:
        """Times as fast as exempt requests, in decode steps."""
        ratios = []
        for round_ in range(self.args.speed_rounds + 1):
            seconds = {}
            pair = [max_depth, self.num_layers]
            for depth in pair if round_ % 2 else reversed(pair):
                params = SamplingParams(
                    max_tokens=self.args.speed_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    detokenize=False,
                    max_depth=depth,
                )
                self.generate(llm, [params] * len(self.windows))
                seconds[depth] = self.decoding
            ratios.append(seconds[self.num_layers] / seconds[max_depth])
        return statistics.median(ratios[1:]) if ratios[1:] else math.nan


def read_windows(args: argparse.Namespace) -> np.ndarray:
    """int64 `[sequences, prompt + forced]`: the beginnings of texts."""
    tokenizer = calibrate.load_tokenizer(args.model)
    texts = calibrate.read_texts(args, held_out=True)
    length = args.prompt_length + args.forced_length
    # First the beginnings of all texts, then what follows in each.
    rows, windows = [], []
    for text in map("".join, map(calibrate.chunks_of, texts)):
        rows.append(tokenizer(text, verbose=False)["input_ids"])
        if len(rows[-1]) >= length:
            windows.append(rows[-1][:length])
        if len(windows) == args.sequences:
            break
    for row in rows:
        starts = range(length, len(row) - length + 1, length)
        windows += [row[start : start + length] for start in starts]
    if len(windows) < args.sequences:
        sys.exit(
            f"--sequences {args.sequences}: the text has {len(windows)} windows of "
            f"{length} tokens"
        )
    return np.array(windows[: args.sequences])


def closed(points: list[Point], point: Point) -> float | None:
    """Share of the gap between random and oracle that a way closes."""
    by_way = {
        p.way: p.perplexity
        for p in points
        if (p.exits, p.leaving) == (point.exits, point.leaving)
    }
    if point.way in (RANDOM, ORACLE, UNIFORM) or not {RANDOM, ORACLE} <= set(by_way):
        return None
    gap = by_way[RANDOM] - by_way[ORACLE]
    return (by_way[RANDOM] - point.perplexity) / gap if gap > 0 else None


def interval(sweep: Sweep, point: Point) -> tuple[float, float] | None:
    """95 % interval of that share, over the choice of sequences.

    None where they are fewer than eight, or the gap is not above 0 in all but 2.5 % of
    the choices: a share of it then means nothing.
    """
    ways = RANDOM, ORACLE, point.way
    plan = point.exits, point.leaving
    losses = np.stack([sweep.losses[way, *plan] for way in ways])
    size = losses.shape[1]
    drawn = np.random.default_rng(0).integers(size, size=(2000, size))
    random, oracle, own = np.exp(losses[:, drawn].mean(2))
    if size < 8 or np.mean(random <= oracle) > 0.025:
        return None
    random, oracle, own = (x[random > oracle] for x in (random, oracle, own))
    low, high = np.percentile((random - own) / (random - oracle), [2.5, 97.5])
    return low, high


def gap_closed(sweep: Sweep, point: Point) -> str:
    share = closed(sweep.points, point)
    if share is None:
        return ""
    found = interval(sweep, point)
    if found is None:
        return "not resolved"
    return "{:.0%} ({:.0%} to {:.0%})".format(share, *found)


def show(sweep: Sweep) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("way", no_wrap=True)
    for name in ("exit", "leaving", "mean depth", "perplexity", "rise", "agreement",
                 "speed-up", "gap closed"):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_row(
        FULL, f"{sweep.num_layers}", "", "1.00", f"{sweep.base:.3f}", "", "1.000"
    )
    for p in sorted(sweep.points, key=lambda p: (len(p.exits), p.exits, p.leaving)):
        table.add_row(
            p.way, ", ".join(map(str, p.exits)),
            ", ".join(f"{share:.0%}" for share in p.leaving), f"{p.mean_depth:.2f}",
            f"{p.perplexity:.3f}", f"{p.rise:+.1%}", f"{p.agreement:.3f}",
            "" if math.isnan(p.speedup) else f"{p.speedup:.2f}×",
            gap_closed(sweep, p),
        )  # fmt: skip
    tokens = sweep.windows.shape[0] * (sweep.args.forced_length - 1)
    Console(width=100).print(
        f"{tokens} tokens decoded at each point, {sweep.args.sequences} at a time;",
        f"{'eager' if sweep.args.enforce_eager else 'compiled'}, {sweep.args.dtype}",
        table,
    )


def write_csv(path: Path, points: list[Point]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Point)])
        for point in points:
            columns = astuple(point)
            writer.writerow(
                "+".join(map(str, c)) if isinstance(c, tuple) else c for c in columns
            )


def draw(path: Path, sweep: Sweep) -> None:
    """Perplexity and agreement against depth and against speed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    ways = [UNIFORM, *sweep.args.ways]
    costs = [("rise", "rise of perplexity"), ("agreement", "greedy agreement")]
    gains = [("mean_depth", "mean depth, share of the layers")]
    if sweep.args.speed_rounds:
        gains.append(("speedup", "speed-up"))
    figure, axes = pyplot.subplots(
        2, len(gains), figsize=(5 * len(gains), 7), squeeze=False, sharey="row",
        constrained_layout=True,
    )  # fmt: skip
    for row, (cost, cost_label) in zip(axes, costs):
        for axis, (gain, gain_label) in zip(row, gains):
            for number, way in enumerate(ways):
                own = [p for p in sweep.points if p.way == way]
                own.sort(key=lambda p: p.mean_depth)
                for nth, exits in enumerate(dict.fromkeys(p.exits for p in own)):
                    line = [p for p in own if p.exits == exits]
                    axis.plot(
                        [getattr(p, gain) for p in line],
                        [getattr(p, cost) for p in line],
                        marker="o" if way != UNIFORM else "x",
                        linestyle="-" if len(exits) == 1 else ":",
                        color=f"C{number}",
                        label=None if nth else way,
                    )
            axis.plot(1.0, 0.0 if cost == "rise" else 1.0, "k*", label=FULL)
            axis.set_xlabel(gain_label)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(cost_label)
    axes[0, 0].legend()
    exits = ", ".join(map(str, sweep.args.cutoffs))
    mixed = "; dotted: several in one step" if sweep.args.mix else ""
    figure.suptitle(f"{Path(sweep.args.model).name}: exits after {exits} layers{mixed}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    # Policies are looked up by name: in this file's module, not in `__main__`.
    import utio_tradeoff

    with interruptible():
        utio_tradeoff.main()
