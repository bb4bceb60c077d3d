# SPDX-License-Identifier: Apache-2.0
"""Drafting by early exits against plain decoding, n-gram lookup and routing.

    .venv/bin/python examples/applications/utio/utio_calibrate.py --cutoffs 2 3 6 9 \\
        --output FILE
    taskset -c 0 .venv/bin/python benchmarks/drafting.py --calibration FILE

The reference model, which was trained with early exits, is inflated to width 1,024, so
that its products cost what those of a model in use cost (`inflate.py`; what it computes
stays the same). FILE is what the first command fitted to it.
Each way is an engine in a process of its own, compiled where its name does not say eager.
They answer the same prompts, of held-out source files, by turns; a ratio is one turn's
tokens a second by those of a plain engine in the same round, from the end of prefill to when
the first request ends, so that all of them decode. Routing lets all tokens leave after 9 of 12
layers, so it costs quality, unlike all others.

Two engines differ by some per cent, even of the same kind. So an engine with a gate takes
each turn twice, once *held*: its gate is taken away and nothing is drafted or routed.
*times held* is what the gate gains or loses in one engine. Its trials come before; its later
looks at other ways are part of a turn.

*tokens a round* are the tokens that a request gets from a pass through all layers;
*ideal* is what that would gain if a pass and a draft cost what the weights say that they
read, and nothing else. *by rows* is the same where the costs are measured: a pass over so many
tokens takes as long as a step of a plain engine with as many requests, and a part of the layers
its part of that. It is for fixed numbers of drafts.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import processes
from processes import Worker

REFERENCE = processes.ROOT / "examples" / "reference_model"
PROMPT = 64
TRIAL = 8
"""Calls after which a gate's trials have ended, of all contexts that there are."""
PLAIN, PLAIN_EAGER = "plain", "plain, eager"
AGAIN = "plain, another engine"
"""Shows what differs between two starts of the same."""


class Engine:
    """In the worker."""

    def start(
        self, model: str, dtype: str, eager: bool, speculative: dict | None = None,
        routing: dict | None = None,
    ) -> None:  # fmt: skip
        from vllm import LLM

        self.llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory_bytes=2**29,  # of 32 requests, in float32 too
            gpu_memory_utilization=0.2,  # on a GPU, what has to be free at the start
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=speculative,
            **routing or {},
        )

    def hold(self, held: bool) -> None:
        """Takes an engine's gate away, or gives it back."""
        from vllm.v1.worker.depth.draft_gate import Way

        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        gate = worker.model_runner.depth_router.gate
        if held:
            gate.choose = lambda *args: Way()
        else:
            del gate.choose

    def generate(
        self, prompts: list[list[int]], tokens: int, temperature: float, seed: int
    ) -> dict:
        """What was done, and in how many seconds, from the end of prefill to when the
        first request has so many tokens. Requests whose drafts are accepted less often
        would go on for longer and by themselves."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        lengths = {f"{n}": 0 for n in range(len(prompts))}
        for (name, _), ids in zip(lengths.items(), prompts):
            params = SamplingParams(
                max_tokens=tokens, temperature=temperature, ignore_eos=True,
                detokenize=False, seed=seed + int(name) if temperature else None,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(name, TokensPrompt(prompt_token_ids=ids), params)

        def step() -> None:
            for output in engine.step():
                lengths[output.request_id] += len(output.outputs[0].token_ids)

        while not all(lengths.values()):
            step()
        before, of_prefill, steps = self.counts(), sum(lengths.values()), 0
        begin = time.perf_counter()
        while max(lengths.values()) < tokens:
            step()
            steps += 1
        done = {
            "seconds": time.perf_counter() - begin,
            "tokens": sum(lengths.values()) - of_prefill,
            "steps": steps,
            "counts": self.counts() - before,
        }
        engine.abort_request([*lengths])
        while engine.has_unfinished_requests():
            engine.step()
        return done

    def counts(self) -> np.ndarray:
        """Requests' rounds with drafts, drafts, those that were accepted, routed steps."""
        values = {metric.name: metric for metric in self.llm.get_metrics()}
        names = ("drafts", "draft_tokens", "accepted_tokens")
        keys = [f"vllm:spec_decode_num_{name}" for name in names]
        keys.append("vllm:utio_routed_steps")
        return np.array([values[key].value if key in values else 0 for key in keys])


def ways(calibration: Path) -> dict[str, dict]:
    """Of each way, the options of its engine."""

    def early_exit(
        exit_layer: int | list[int], most: int, least: float, **others
    ) -> dict:
        return dict(
            method="early_exit", exit_layer=exit_layer, num_speculative_tokens=most,
            calibration=str(calibration), min_acceptance=least, **others,
        )  # fmt: skip

    routed = dict(
        enable_utio=True, utio_bucket_cutoffs=[9], utio_bucket_shares=[1.0, 0.0],
        utio_calibration=str(calibration), utio_min_batch_size=1,
    )  # fmt: skip
    gated = early_exit(3, 2, 0, draft_gate=True)
    window = dict(prompt_lookup_max=4, prompt_lookup_min=2)
    ngram = dict(method="ngram", num_speculative_tokens=3, **window)
    compiled, eager = dict(eager=False), dict(eager=True)
    return {
        PLAIN: dict(speculative=None, **compiled),
        PLAIN_EAGER: dict(speculative=None, **eager),
        AGAIN: dict(speculative=None, **compiled),
        "n-gram, k = 3": dict(speculative=ngram, **compiled),
        "exit after 3, k ≤ 6, chance ≥ 0.5": dict(
            speculative=early_exit(3, 6, 0.5), **compiled
        ),
        "exit after 3, k ≤ 2, chance ≥ 0.7": dict(
            speculative=early_exit(3, 2, 0.7), **compiled
        ),
        "exit after 3, k ≤ 1, chance ≥ 0.7": dict(
            speculative=early_exit(3, 1, 0.7), **compiled
        ),
        "exit after 3, k = 2": dict(speculative=early_exit(3, 2, 0), **compiled),
        "exit after 3, k = 1": dict(speculative=early_exit(3, 1, 0), **compiled),
        "exit after 2, k = 1": dict(speculative=early_exit(2, 1, 0), **compiled),
        "n-gram, else exit after 3, k ≤ 3, chance ≥ 0.5": dict(
            speculative=early_exit(3, 3, 0.5, **window), **compiled
        ),
        "n-gram, else exit after 3, k ≤ 3, gate": dict(
            speculative=early_exit(3, 3, 0, draft_gate=True, **window), **compiled
        ),
        "exit after 3, k ≤ 2, gate": dict(speculative=gated, **compiled),
        "exit after 2 or 3, k ≤ 2, gate": dict(
            speculative=early_exit([2, 3], 2, 0, draft_gate=True), **compiled
        ),
        "routing, gate": dict(speculative=None, routing=routed, **compiled),
        "exit after 3, k ≤ 2, or routing, gate": dict(
            speculative=gated, routing=routed, **compiled
        ),
        "exit after 3, k = 2, eager": dict(speculative=early_exit(3, 2, 0), **eager),
    }


def has_draft_gate(name: str) -> bool:
    return "exit" in name and name.endswith("gate")


def inflated(times: int = 4, model: Path = REFERENCE / "model") -> Path:
    """The model of so many times the reference model's width, or another's of its shape,
    made on first use."""
    name = "inflated" if times == 4 else f"inflated-{times}-times"
    if model != REFERENCE / "model":
        name += f"-{model.name}"
    folder = processes.BUILD / "models" / name
    made, source = folder / "config.json", model / "model.safetensors"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        sys.path.insert(0, str(REFERENCE))
        import inflate

        inflate.inflate_model(model, folder, times, None)
    return folder


def inflated_calibration(
    calibration: Path, times: int = 4, model: Path = REFERENCE / "model"
) -> Path:
    """What was fitted to the model, for `inflated`."""
    sys.path.insert(0, str(REFERENCE))
    import inflate

    folder = inflated(times, model)
    target = folder.with_name(f"{folder.name}-calibration.safetensors")
    inflate.inflate_calibration(calibration, target, times)
    return target


def read_prompts(count: int) -> list[list[int]]:
    """The beginnings of held-out files."""
    sys.path.insert(0, str(REFERENCE))
    from corpus import pinned_archive, read
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "model")
    prompts = []
    for text in read(pinned_archive(), held_out=True).values():
        ids = tokenizer(text[:4000], add_special_tokens=False)["input_ids"]
        if len(ids) >= 2 * PROMPT:
            prompts.append(ids[PROMPT : 2 * PROMPT])
    return [prompts[i % len(prompts)] for i in range(count)]


class Weights:
    """Of a layer, a translator and the head, by those of all layers and the head."""

    def __init__(self, model: Path):
        config = json.loads((model / "config.json").read_text())
        hidden, size = config["hidden_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
        layer = hidden * size * 2 * (queries + keys) + 3 * hidden * config["intermediate_size"]
        head = hidden * config["vocab_size"]
        whole = config["num_hidden_layers"] * layer + head
        self.layer, self.head, self.translator = (
            part / whole for part in (layer, head, 3 * hidden * hidden)
        )

    def draft(self, exit_layer: int) -> float:
        return exit_layer * self.layer + self.translator + self.head

    def round(self, exit_layer: int, num_drafts: int, rows: float) -> float:
        """What a round takes if drafting keeps its states, by a plain step.

        The last draft's pass draws nothing. `rows` is the time of a pass of all layers over
        the rows that are verified, by a plain step's.
        """
        drafts = num_drafts * self.draft(exit_layer) + exit_layer * self.layer
        return drafts + (1 - exit_layer * self.layer) * rows


def num_fixed_drafts(options: dict) -> int:
    """Of each round, from one exit; 0 if they differ."""
    drafting = options["speculative"] or {}
    is_fixed = isinstance(drafting.get("exit_layer"), int) and not (
        drafting["min_acceptance"] or "draft_gate" in drafting or "prompt_lookup_max" in drafting
    )
    return drafting["num_speculative_tokens"] if is_fixed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, default=REFERENCE / "model",
        help="to inflate, of the reference model's shape and tokenizer",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--cases", nargs="+", metavar="BATCH:TEMPERATURE",
        default=[f"{batch}:{temperature}" for batch in (1, 2, 4, 8) for temperature in (1, 0)],
    )  # fmt: skip
    parser.add_argument(
        "--ways", nargs="+", metavar="WORD", help="only plain ones, and those with a word"
    )
    parser.add_argument("--no-eager", action="store_true", help="only what is compiled")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--starts", type=int, default=1,
        help="of each engine, whose speed differs from start to start",
    )  # fmt: skip
    args = parser.parse_args()
    model = inflated(model=args.model)
    wide = inflated_calibration(args.calibration, model=args.model)
    cases = [(int(batch), float(t)) for batch, t in (x.split(":") for x in args.cases)]
    prompts = read_prompts(args.rounds * max(batch for batch, _ in cases))
    chosen = {
        name: options
        for name, options in ways(wide).items()
        if not args.ways
        or name in (PLAIN, PLAIN_EAGER)
        or any(word in name for word in args.ways)
        if not (args.no_eager and options["eager"])
    }
    turns = [Turns(batch, temperature, chosen) for batch, temperature in cases]
    for start in range(args.starts):
        # On a CPU, weights in small pages are a sixth slower and differ with where they lie.
        huge = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        workers = {name: Worker(__file__, "v1", **huge) for name in chosen}
        try:
            for name, options in chosen.items():
                workers[name].call("start", model=str(model), dtype=args.dtype, **options)
            for case in turns:
                measure(args, workers, prompts, chosen, case)
                if start == args.starts - 1:
                    show(args, model, chosen, case)
        finally:
            for worker in workers.values():
                worker.__exit__()


class Turns:
    """What was measured at one batch size and temperature."""

    def __init__(self, batch: int, temperature: float, names: Iterable[str]):
        self.batch, self.temperature = batch, temperature
        self.seconds: dict[str, list[list[float]]] = {name: [] for name in names}
        """A token, of each way: a list a start of its engine, with a number a turn."""
        self.held = {name: [] for name in names if has_draft_gate(name)}
        """The same of engines whose gate is taken away."""
        self.steps_of: dict[int, list[float]] = {}
        """Seconds of a step of a plain engine, by its number of requests."""
        self.counts = {name: np.zeros(4) for name in names}
        self.tokens = dict.fromkeys(names, 0)
        self.steps = dict.fromkeys(names, 0)

    def ratio(self, name: str, plain: str) -> str:
        """Times as fast as a plain engine: the median, with the least and the greatest, of
        the turns of one start, or of several starts' medians."""
        starts = [
            [a / b for a, b in zip(*each)]
            for each in zip(self.seconds[plain], self.seconds[name])
        ]
        if len(starts) == 1:
            return processes.ratio(starts[0])
        return processes.ratio([statistics.median(ratios) for ratios in starts])

    def gain(self, name: str) -> str:
        """Times as fast as with the gate taken away: the mean of all turns with its
        standard error."""
        turns = zip(itertools.chain(*self.held[name]), itertools.chain(*self.seconds[name]))
        ratios = [held / own for held, own in turns]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0
        return f"{statistics.mean(ratios):.3f} ± {error:.3f}"


def measure(args, workers: dict[str, Worker], prompts, ways, case: Turns) -> None:
    """The turns of one start of the engines."""
    batch = case.batch
    verified = {batch * (num_fixed_drafts(options) + 1) for options in ways.values()}
    job = dict(tokens=args.tokens, temperature=case.temperature)
    for name, worker in workers.items():
        # What the first calls alone do.
        for n in range(TRIAL if name.endswith("gate") else 1):
            worker.call("generate", prompts=prompts[:batch], seed=n, **job)
        case.seconds[name].append([])
        if name in case.held:
            case.held[name].append([])
    for n in range(args.rounds):
        mine = [prompts[(n * batch + i) % len(prompts)] for i in range(batch)]
        call = dict(prompts=mine, seed=1000 * n) | job
        for name, worker in workers.items():
            turns = [False, True] if name in case.held else [False]
            for held in turns[:: -1 if n % 2 else 1]:
                if held:
                    worker.call("hold", held=True)
                    found = worker.call("generate", **call)
                    worker.call("hold", held=False)
                    case.held[name][-1].append(found["seconds"] / found["tokens"])
                else:
                    found = worker.call("generate", **call)
                    case.seconds[name][-1].append(found["seconds"] / found["tokens"])
                    case.counts[name] += found["counts"]
                    case.tokens[name] += found["tokens"]
                    case.steps[name] += found["steps"]
        for rows in sorted(verified) if len(verified) > 1 else ():
            mine = [prompts[i % len(prompts)] for i in range(n * rows, (n + 1) * rows)]
            found = workers[PLAIN].call("generate", **call | {"prompts": mine})
            case.steps_of.setdefault(rows, []).append(found["seconds"] / found["steps"])


def show(args, model: Path, ways: dict[str, dict], case: Turns) -> None:
    batch, seconds = case.batch, case.seconds
    rows, plains = [], [name for name in (PLAIN, PLAIN_EAGER) if name in seconds]
    weights = Weights(model)
    for name, options in ways.items():
        speculative = options["speculative"]
        _, drafted, accepted, routed = case.counts[name]
        generated = case.tokens[name]
        rounds = generated - accepted
        ideal = generated / rounds
        drafting = speculative or {}
        exit_layer = drafting.get("exit_layer")
        # Drafts of several layers, or those that were looked up, do not cost the same.
        mixed = isinstance(exit_layer, list) or (exit_layer and "prompt_lookup_max" in drafting)
        if exit_layer and not mixed:
            ideal /= 1 + weights.draft(exit_layer) * drafted / rounds
        by_rows = ""
        if fixed := num_fixed_drafts(options):
            plain, verified = (
                statistics.median(case.steps_of[rows]) for rows in (batch, batch * (fixed + 1))
            )
            cost = weights.round(exit_layer, fixed, verified / plain)
            by_rows = f"{generated / rounds / cost:.2f}"
        rate = 1 / statistics.median(itertools.chain(*seconds[name]))
        rows.append([
            name,
            f"{accepted / drafted:.2f}" if drafted else "",
            f"{drafted / rounds:.2f}" if drafted else "",
            f"{generated / rounds:.2f}",
            "" if mixed else f"{ideal:.2f}",
            by_rows,
            f"{routed / case.steps[name]:.2f}" if options.get("routing") else "",
            case.gain(name) if name in case.held else "",
            *(case.ratio(name, plain) for plain in plains),
            f"{rate:.1f}",
        ])  # fmt: skip
    temperature = case.temperature
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    starts = f", {args.starts} starts" * (args.starts > 1)
    processes.show(
        f"drafting-{batch}-{temperature:g}",
        f"Drafting, batch {batch}, {kind}, {args.dtype}{starts}",
        ["way", "accepted", "drafts a round", "tokens a round", "ideal", "by rows",
         "steps routed", "times held", *(f"times {plain}" for plain in plains), "tokens a second"],
        rows,
        seconds=seconds,
        held=case.held,
        steps_of=case.steps_of,
    )  # fmt: skip


if __name__ == "__main__":
    processes.main(main, Engine)
