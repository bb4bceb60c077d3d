# SPDX-License-Identifier: Apache-2.0
"""What routing by depth saves and what it costs, for a model and a text.

    utio=examples/applications/utio
    .venv/bin/python $utio/utio_tradeoff.py --calibration probe.safetensors --output plot.png
    .venv/bin/python $utio/utio_tradeoff.py --model facebook/opt-125m --cutoffs 4 6 8 \\
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

Ways: random, the mean of several draws; tis, the score known before a step; entropy, of
the distribution that the exit gives; probe and agreement, of a calibration made by
utio_calibrate.py, which predict the divergence from full depth and whether the greedy
choice is full depth's. Oracles know, by teacher forcing on Transformers, what each
token's exit truly costs: its divergence from full depth, the change of the forced
token's log-probability, or whether the greedy choice changes. They can not be had. How
much of the gap between random and the oracle of a measure a way closes says how good it
is; the oracle of the divergence says what not knowing the next token leaves of it.

Drafting, with `--drafting`, loses nothing: the first layers draft, all verify. An engine
of its own generates the same texts in turn with the other one at full depth. Its
agreement is the share of the tokens, place by place, that are the same.
"""

import argparse
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Policies and the text that is forced are shared with the engine: one process, and the
# model runner that takes logits processors.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "applications")]

import utio_options
from common import quiet
from common.program import any_terminal, interruptible
from utio_options import (
    AGREEMENT,
    EARLY,
    LATE,
    ORACLE,
    ORACLE_AGREEMENT,
    ORACLE_PERPLEXITY,
    ORACLES,
    RANDOM,
)

if __name__ == "__main__":  # says --help and mistakes before vLLM is imported
    utio_options.parse_tradeoff()
    quiet.hush()
    any_terminal()

import numpy as np
import utio_calibrate as calibrate
from common.decoding import ForcedTokens, decode_together
from compare.texts import Encoder, encode_stream
from score_perplexity import new_engine
from tqdm import tqdm
from utio_frontier import (
    DISAGREEMENT,
    DRAFTING,
    PERPLEXITY,
    UNIFORM,
    Point,
    Result,
    draw,
    show,
    write_csv,
)
from utio_states import Exits, Translator, progress
from utio_texts import Text, begin_of, chunks_of, parts_of, read_texts
from utio_ways import AtTheCutoff, BeforeTheStep, Chosen, ExitHead
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.depth.calibration import Calibration, load_calibration


def main(argv: list[str] | None = None) -> list[Point]:
    args = utio_options.parse_tradeoff(argv)
    config = calibrate.load_config(args.model)
    args.cutoffs = args.cutoffs or [config.num_hidden_layers // 2]
    calibrate.check_cutoffs(args.cutoffs, config)
    for exit_layer, _ in args.drafting:
        if exit_layer >= config.num_hidden_layers:
            sys.exit(
                f"--drafting {exit_layer}: the model has {config.num_hidden_layers} layers"
            )
    length = args.prompt_length + args.forced_length + args.speed_tokens
    if length > config.max_position_embeddings:
        sys.exit(
            f"--prompt-length, --forced-length and --speed-tokens are {length} tokens; "
            f"the model takes {config.max_position_embeddings}"
        )
    sweep = Sweep(args, config.num_hidden_layers)
    failure = None
    try:
        sweep.run()
    except KeyboardInterrupt:
        print("interrupted; what there is:", file=sys.stderr)
    except (Exception, SystemExit) as error:
        if not sweep.result.points:
            raise
        failure = error
        print("failed; what there is:", file=sys.stderr)
    result = sweep.result
    if not result.points:
        sys.exit("nothing was measured")
    show(result, args)
    if args.csv:
        write_csv(args.csv, result.points)
    if args.output:
        draw(args.output, result, args)
    if failure is not None:
        raise failure
    return result.points


class Sweep:
    """Runs the ways of decoding, and keeps what came of them."""

    def __init__(self, args: argparse.Namespace, num_layers: int):
        self.args = args
        self.num_layers = num_layers
        self.windows, files = read_windows(args)
        self.result = Result(num_layers, files)
        self.engines: list[LLM] = []  # of which none may be collected before the others

    def run(self) -> None:
        args = self.args
        early = [way for way in args.ways if way in EARLY]
        late = [way for way in args.ways if way in LATE]
        llm = self.engine(BeforeTheStep)  # which refuses what does not fit the model
        if AGREEMENT in late and not self.calibration().acceptance:
            sys.exit(
                f"--calibration {args.calibration} has no acceptance probes, which "
                f"--ways {AGREEMENT} needs: fit it anew, or name other --ways"
            )
        if {*late} & {*ORACLES}:
            Chosen.known = self.known()
        exits = tuple(args.cutoffs)
        plans = [((cutoff,), (s,)) for cutoff in exits for s in args.leaving]
        plans += [(exits, shares) for shares in args.mix]
        total = 1 + len(exits) + len(plans) * len(args.ways) + len(args.drafting)
        with tqdm(total=total, unit="way", disable=None) as bar:
            Chosen.set(RANDOM, self.shares((), ()))
            full = self.force(llm, max_depth=self.num_layers)
            self.greedy = full.greedy
            self.result.base = math.exp(-full.logprobs.mean())
            bar.update()
            for cutoff in exits:
                forced = [self.force(llm, max_depth=cutoff)]
                speedup = self.speedup(llm, cutoff)
                self.add(UNIFORM, (cutoff,), (1.0,), forced, speedup)
                bar.update()
            for exit_layer, num_drafts in args.drafting:
                self.draft(llm, exit_layer, num_drafts)
                bar.update()
            for ways, policy in ((early, BeforeTheStep), (late, AtTheCutoff)):
                if not ways:
                    continue
                if policy is AtTheCutoff:
                    llm = self.engine(policy)
                    policy.head = llm.apply_model(ExitHead)[0]
                for plan in plans:
                    for way in ways:
                        self.route(llm, way, plan)
                        bar.update()

    def route(self, llm: LLM, way: str, plan: tuple) -> None:
        """Measures one way of routing with one plan."""
        forced = []
        for seed in range(self.args.random_draws if way == RANDOM else 1):
            Chosen.set(way, self.shares(*plan), seed)
            if way in LATE:
                AtTheCutoff.newest.config.bucket_shares = Chosen.shares
            forced.append(self.force(llm))
        self.add(way, *plan, forced, self.speedup(llm, None))

    def shares(self, exits: Sequence[int], leaving: Sequence[float]) -> list[float]:
        """Of each of the engine's cutoffs."""
        known = dict(zip(exits, leaving))
        early = [known.get(cutoff, 0.0) for cutoff in self.args.cutoffs]
        return [*early, 1 - sum(early)]

    def engine(self, policy: type) -> LLM:
        """An engine that routes by a policy."""
        options = {}
        if self.args.calibration:
            options["utio_calibration"] = str(self.args.calibration)
        return self.start(
            logits_processors=[ForcedTokens],
            enable_utio=True,
            utio_bucket_cutoffs=self.args.cutoffs,
            utio_min_batch_size=1,
            utio_gate=False,
            utio_policy=f"{policy.__module__}.{policy.__qualname__}",
            **options,
        )

    def start(self, **options) -> LLM:
        args = self.args
        llm = new_engine(
            "--prompt-length, --forced-length and --speed-tokens",
            model=args.model,
            dtype=args.dtype,
            enforce_eager=args.enforce_eager,
            max_num_seqs=args.sequences,
            max_model_len=self.windows.shape[1] + args.speed_tokens,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            # Each GPU holds several engines; vLLM wants this share free at each start.
            gpu_memory_utilization=0.05,
            seed=0,
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

    def calibration(self) -> Calibration:
        """Of `--calibration`."""
        cutoffs = [*self.args.cutoffs, self.num_layers]
        try:
            return load_calibration(str(self.args.calibration), cutoffs)
        except ValueError as error:
            sys.exit(f"--calibration: {error}")

    def known(self) -> dict[str, dict[tuple[str, int], np.ndarray]]:
        """What each oracle knows of each decode step, by request and cutoff: KL(full
        depth || exit) in nats; what the forced token loses in log-probability, in nats;
        1 where the greedy choice is another."""
        args = self.args
        model = calibrate.load_model(args.model, args.dtype, "cpu")
        exits = Exits(model, args.cutoffs)
        if args.calibration and (loaded := self.calibration().translators):
            exits.translators = [
                Translator(*loaded[cutoff]) for cutoff in args.cutoffs
            ]
        found: dict = {oracle: {} for oracle in ORACLES}
        windows = self.windows.tolist()
        for n, rows in enumerate(progress(exits, windows, 8, "oracle")):
            of_oracle = {
                ORACLE: rows.kl,
                ORACLE_PERPLEXITY: rows.exit_nll - rows.full_nll,
                ORACLE_AGREEMENT: 1.0 - rows.agrees,
            }
            for oracle, costs in of_oracle.items():
                for cutoff, cost in zip(args.cutoffs, costs):
                    # Row 0 is the window's second token; the first decode step runs
                    # the first forced one.
                    found[oracle][f"{n}", cutoff] = cost[args.prompt_length - 1 :]
        return found

    def force(self, llm: LLM, max_depth: int | None = None) -> "Forced":
        """Decodes the windows, their own tokens forced."""
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
        return Forced(logprobs[:, 1:], greedy[:, 1:], depth / self.num_layers)

    def generate(self, llm: LLM, params: list[SamplingParams]) -> list:
        """The completions, and in `decoding` the seconds since all had a token.

        Requests are named by their numbers, all decode at once.
        """
        Chosen.forget()
        prompts = (w[: self.args.prompt_length].tolist() for w in self.windows)
        found, self.decoding = decode_together(llm, zip(prompts, params))
        return found

    def add(
        self,
        way: str,
        exits: tuple[int, ...],
        leaving: tuple[float, ...],
        forced: list["Forced"],
        speedup: float,
    ) -> None:
        """Keeps a way's point, of one draw or the mean of several."""
        result, key = self.result, (way, exits, leaving)
        losses = np.mean([-one.logprobs.mean(1) for one in forced], axis=0)
        changed = np.mean([(one.greedy != self.greedy).mean(1) for one in forced], axis=0)
        result.costs[PERPLEXITY][key] = losses
        result.costs[DISAGREEMENT][key] = changed
        perplexity = math.exp(losses.mean())
        depth = float(np.mean([one.depth for one in forced]))
        rise, agreement = perplexity / result.base - 1, 1 - float(changed.mean())
        result.points.append(
            Point(way, exits, leaving, depth, perplexity, rise, agreement, speedup)
        )

    def draft(self, llm: LLM, exit_layer: int, num_drafts: int) -> None:
        """Measures drafting by early exits, which must not change a token."""
        config = dict(
            method="early_exit", exit_layer=exit_layer, num_speculative_tokens=num_drafts
        )
        if self.args.calibration:
            config["calibration"] = str(self.args.calibration)
        drafting = self.start(speculative_config=config)
        whole = self.free(llm, self.num_layers)
        drafted = self.free(drafting, None)
        same = np.mean(
            [
                np.array(a.token_ids) == np.array(b.token_ids)
                for a, b in zip(whole, drafted)
            ]
        )
        speedup = self.timed((drafting, None), (llm, self.num_layers))
        point = Point(
            DRAFTING, (exit_layer,), (num_drafts,), 1.0, self.result.base, 0.0,
            float(same), speedup,
        )  # fmt: skip
        self.result.points.append(point)

    def free(self, llm: LLM, max_depth: int | None) -> list:
        """Generates without forced tokens."""
        params = SamplingParams(
            max_tokens=self.args.speed_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_depth=max_depth,
        )
        return self.generate(llm, [params] * len(self.windows))

    def speedup(self, llm: LLM, max_depth: int | None) -> float:
        """Times as fast as exempt requests, in decode steps."""
        return self.timed((llm, max_depth), (llm, self.num_layers))

    def timed(self, way: tuple[LLM, int | None], base: tuple[LLM, int]) -> float:
        """Times as fast as the other way, the median of rounds by turns; both are an
        engine and the `max_depth` of its requests. NaN without rounds."""
        ratios = []
        for round_ in range(self.args.speed_rounds + 1):
            seconds = {}
            pair = [("way", way), ("base", base)]
            for name, one in pair if round_ % 2 else reversed(pair):
                self.free(*one)
                seconds[name] = self.decoding
            ratios.append(seconds["base"] / seconds["way"])
        return statistics.median(ratios[1:]) if ratios[1:] else math.nan


class Forced(NamedTuple):
    """What came of a forced text."""

    logprobs: np.ndarray  # float64 [sequences, decode steps], of the forced tokens
    greedy: np.ndarray  # int64 [sequences, decode steps], the most probable ones
    depth: float  # mean share of the layers


def read_windows(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Windows of the texts, as many of each as can be.

    Each begins as the tokenizer begins a text. No more than some windows of a text are
    held.

    Returns:
        int64 `[sequences, prompt + forced]`, and the text that each is of, `[sequences]`.
    """
    tokenizer = calibrate.load_tokenizer(args.model)
    texts = read_texts(args, held_out=True)
    length = args.prompt_length + args.forced_length
    prefix = begin_of(tokenizer)
    encoder = Encoder(tokenizer, special_tokens=False)

    def windows_of(text: Text, most: int) -> list[list[int]]:
        pieces = encode_stream(encoder, chunks_of(text))
        parts = parts_of(pieces, length - len(prefix))
        windows = (prefix + part for part in parts)
        return [*islice((w for w in windows if len(w) == length), most)]

    order = random.Random(0).sample(range(len(texts)), len(texts))
    most, found = math.ceil(args.sequences / len(texts)), -1
    while True:
        rows = {index: windows_of(texts[index], most) for index in order}
        before, found = found, sum(map(len, rows.values()))
        if found >= args.sequences or found == before:
            break
        most *= 2
    if found < args.sequences:
        sys.exit(
            f"--sequences {args.sequences}: the text has {found} windows of "
            f"{length} tokens"
        )
    # The first of each text, then the second of each: few texts count as evenly as many.
    ranked = [
        (rank, index) for rank in range(most) for index in order if rank < len(rows[index])
    ][: args.sequences]
    windows = [rows[index][rank] for rank, index in ranked]
    return np.array(windows), np.array([index for _, index in ranked])


if __name__ == "__main__":
    with interruptible():
        main()
