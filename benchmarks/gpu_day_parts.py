# SPDX-License-Identifier: Apache-2.0
"""The parts of a GPU day that need the wheel; `gpu_day.py` runs each in a process.

What is right comes from Hugging Face in float32 on the CPU (`tests/oracle.py`,
`tests/depth_oracle.py`). Speed and memory are measured by the benchmarks beside this
file. The reference model is part of the repository, so nothing is downloaded.
"""

import argparse
import json
import os
import statistics
import time
from itertools import product
from pathlib import Path

import numpy as np
import peak_memory
import processes
from processes import Worker

MODEL = processes.ROOT / "examples" / "reference_model" / "model"
LAYERS, VOCABULARY = 12, 4096
DEPTHS = (4, 8, LAYERS)
LIMIT = {"cpu": 1e-4, "cuda": 0.03}
"""Nats that a float32 log-probability may be off by. On a CPU as in the tests. On a GPU
attention kernels may round products to TF32, whose steps are a quarter of bfloat16's,
and the reference model in bfloat16 is 0.13 off in Hugging Face (`equality_table.py`)."""
GENERATED = 12


class Engine(peak_memory.Engine):
    """In the worker."""

    def open(self, **options) -> dict:
        """Starts an engine; says what it took of what was asked for."""
        import vllm

        self.llm = vllm.LLM(
            str(MODEL),
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=2**27,
            seed=0,
            **{"dtype": "float32", "enforce_eager": True} | options,
        )
        config = self.llm.llm_engine.vllm_config
        return {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "asynchronous": bool(config.scheduler_config.async_scheduling),
            "graphs": str(config.compilation_config.cudagraph_mode).split(".")[-1],
        }

    def score(self, prompts: list[list[int]], top: list[list[list[int]]]) -> list[dict]:
        """Scores candidates at every position of each prompt, beside generation."""
        from vllm import SamplingParams, TokensPrompt

        requests = [
            TokensPrompt(prompt_token_ids=ids, target_token_ids=rows)
            for ids, rows in zip(prompts, top)
        ]
        params = [
            SamplingParams(
                max_tokens=GENERATED, temperature=0, ignore_eos=True, target_generated={}
            )
            if n % 2
            else SamplingParams(max_tokens=0)
            for n in range(len(prompts))
        ]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            {
                "logprobs": output.target_logprobs.logprobs,
                "entropy": output.target_logprobs.entropy,
                "tokens": list(output.outputs[0].token_ids),
                "generated": output.outputs[0].target_logprobs,
            }
            for output in outputs
        ]

    def decode(self, prompts: list[list[int]], depths: list[int | None]) -> list[dict]:
        """Greedy tokens and their log-probabilities, each prompt to its depth."""
        from vllm import SamplingParams, TokensPrompt

        common = dict(max_tokens=GENERATED, temperature=0, ignore_eos=True, logprobs=0)
        params = [
            SamplingParams(**common | ({"max_depth": depth} if depth else {}))
            for depth in depths
        ]
        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            {
                "tokens": list(choice.token_ids),
                "logprobs": [
                    entry[token].logprob
                    for token, entry in zip(choice.token_ids, choice.logprobs)
                ],
            }
            for choice in (output.outputs[0] for output in outputs)
        ]

    def run(self, way: str, rows: int) -> dict:
        """As of `peak_memory.py`; on a GPU, of the device's memory."""
        import torch

        if not torch.cuda.is_available():
            return super().run(way, rows)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        super().run(way, rows)
        return {"peak": torch.cuda.max_memory_allocated(), "before": before}

    def decode_steps(self, model: str, batch: int, rounds: int, dtype: str) -> dict:
        """Seconds of decode steps by way, of `test_depth_routing.py`."""
        import test_depth_routing as routing
        import vllm

        if not hasattr(self, "llm"):
            self.llm = vllm.LLM(
                model,
                skip_tokenizer_init=True,
                dtype=dtype,
                enforce_eager=True,
                max_model_len=routing.LONGEST,
                max_num_batched_tokens=1024,
                max_num_seqs=256,
                kv_cache_memory_bytes=3 * 2**30,
                seed=0,
                async_scheduling=False,
                enable_utio=True,
                utio_bucket_cutoffs=list(routing.CUTOFFS),
                utio_bucket_shares=list(routing.SHARES),
                utio_min_batch_size=1,
                utio_gate=False,
            )
        ways = (routing.STAIRCASE, routing.TRUNCATED, routing.SCORED, routing.FALLBACK)
        times = routing.decode_steps(self.llm, batch, 32, ways, rounds)
        routing.stop(self.llm, batch)
        return {name: values.tolist() for name, values in times.items()}


def worker(device: str, runner: str, script: str = __file__, **environ) -> Worker:
    """A worker on a runner; on a GPU without what V2 needs on a CPU."""
    if device == "cpu":
        return Worker(script, runner, **environ)
    environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    return Worker(script, "v1", **environ)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCABULARY, n).tolist() for n in lengths]


def oracle():
    from oracle import Oracle  # tests/oracle.py

    return Oracle(MODEL)


def not_greedy(oracle, ids: list[int], tokens: list[int], limit: float) -> int:
    """How many tokens are not the most probable after the others, up to ties."""
    if not tokens:
        return 0
    logits = oracle.logits(ids + tokens)[len(ids) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(tokens)[:, None], axis=1)[:, 0]
    return int((chosen < logits.max(axis=1) - limit).sum())


# ------------------------------------------------------------------ parts


def scoring(device: str) -> dict:
    """{V1, V2} × {eager, CUDA graphs} × {synchronous, asynchronous scheduling}."""
    truth, limit = oracle(), LIMIT[device]
    prompts = random_prompts((9, 70, 30, 140))
    rng = np.random.default_rng(1)
    targets = [
        np.column_stack([ids[1:], rng.integers(0, VOCABULARY, (len(ids) - 1, 3))]).tolist()
        for ids in prompts
    ]
    both = (False, True) if device == "cuda" else (False,)
    rows, problems = [], []
    for runner, graphs, asynchronous in product(("v1", "v2"), both, both):
        options = dict(enforce_eager=not graphs, async_scheduling=asynchronous)
        with worker(device, runner) as engine:
            taken = engine.call("open", **options)
            found = engine.call("score", prompts=prompts, top=targets)
        off, wrong = 0.0, 0
        for ids, wanted, one in zip(prompts, targets, found):
            expected = truth.scores(ids, wanted)
            off = max(
                off,
                np.abs(one["logprobs"] - expected.logprobs).max(),
                np.abs(one["entropy"] - expected.entropy).max(),
            )
            wrong += not_greedy(truth, ids, one["tokens"], 2 * limit)
            if tokens := one["tokens"]:
                expected = truth.scores(ids + tokens, tokens)
                found_here = one["generated"]
                off = max(
                    off,
                    np.abs(found_here.logprobs - expected.logprobs).max(),
                    np.abs(found_here.entropy - expected.entropy).max(),
                )
                # They are read from the logits that the tokens were chosen by.
                wrong += int((found_here.ranks != 1).sum())
        name = f"{runner.upper()}, graphs {graphs}, asynchronous {asynchronous}"
        if not off <= limit or wrong:
            problems.append(f"{name}: {off:.1e} nats, {wrong} tokens not greedy")
        asked = (runner.upper(), asynchronous, graphs)
        got = (taken["runner"], taken["asynchronous"], taken["graphs"] != "NONE")
        if asked != got:
            problems.append(f"{name}: the engine took {taken}")
        rows.append([*taken.values(), f"{off:.1e}", wrong])
    columns = ["runner", "asynchronous", "graphs", "greatest error, nats", "not greedy"]
    title = f"Scores against Hugging Face in float32, at most {limit:g} nats off"
    tables = [{"title": title, "columns": columns, "rows": rows}]
    return {"tables": tables, "problems": problems}


def exactness(device: str) -> dict:
    """Depths that requests name, and drafting by early exits, on both runners."""
    from depth_oracle import DepthOracle  # tests/depth_oracle.py

    limit, truth, by_depth = LIMIT[device], oracle(), DepthOracle(MODEL)
    prompts = random_prompts((9, 70, 30, 5))
    depths = [*DEPTHS, None]
    utio = dict(
        enable_utio=True, utio_bucket_cutoffs=DEPTHS[:-1], utio_min_batch_size=1000
    )
    draft = dict(method="early_exit", exit_layer=2, num_speculative_tokens=3)
    rows, problems = [], []
    for runner in ("v1", "v2"):
        with worker(device, runner) as engine:
            taken = check_runner(engine.call("open", **utio), runner, problems)
            found = engine.call("decode", prompts=prompts, depths=depths)
        off = 0.0
        for ids, depth, one in zip(prompts, depths, found):
            logits = by_depth.logits(ids, one["tokens"], [depth or LAYERS] * GENERATED)
            logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            named = logp[np.arange(GENERATED), one["tokens"]]
            off = max(off, np.abs(named - one["logprobs"]).max())
        if not off <= limit:
            problems.append(f"{taken}, depths of requests: {off:.1e} nats")
        rows.append([taken, f"depths {DEPTHS} of requests", f"{off:.1e}", ""])
        with worker(device, runner) as engine:
            opened = engine.call("open", speculative_config=draft)
            taken = check_runner(opened, runner, problems)
            found = engine.call("decode", prompts=prompts, depths=[None] * len(prompts))
        pairs = zip(prompts, found)
        wrong = sum(not_greedy(truth, p, one["tokens"], 2 * limit) for p, one in pairs)
        if wrong:
            problems.append(f"{taken}, drafting: {wrong} tokens not greedy")
        rows.append([taken, "drafting by exits after 2 layers", "", wrong])
    columns = ["runner", "what", "greatest error, nats", "not greedy"]
    title = "Exactness of depth, against Hugging Face in float32"
    tables = [{"title": title, "columns": columns, "rows": rows}]
    return {"tables": tables, "problems": problems}


def check_runner(opened: dict, runner: str, problems: list[str]) -> str:
    """The runner that an engine took; another one than was asked for is a problem."""
    taken = opened["runner"]
    if taken != runner.upper():
        problems.append(f"{runner.upper()} was asked for, the engine took {taken}")
    return taken


def routing(device: str) -> dict:
    """Decode steps with depth routing, eager against eager (`test_depth_routing.py`)."""
    width, batches, rounds, dtype = (
        (4096, (32, 128, 256), 11, "bfloat16") if device == "cuda" else (128, (8,), 2, "float32")
    )  # fmt: skip
    model = str(processes.random_llama(32_000, width, 16, dtype))
    rows, names = [], []
    with worker(device, "v1") as engine:
        for batch in batches:
            times = engine.call(
                "decode_steps", model=model, batch=batch, rounds=rounds, dtype=dtype
            )
            full = times.pop("full depth")
            names = sorted(times)
            ratios = [[a / b for a, b in zip(full, times[name])] for name in names]
            milliseconds = f"{statistics.median(full) * 1e3:.1f}"
            rows.append([batch, milliseconds, *map(processes.ratio, ratios)])
    columns = ["batch", "full depth, ms", *names]
    title = f"Decode steps, eager, 16 layers of width {width}: times as fast as full depth"
    tables = [{"title": title, "columns": columns, "rows": rows}]
    return {"tables": tables, "problems": []}


def drafting(device: str) -> dict:
    """Plain decoding, n-gram lookup and early exits, by turns (`drafting.py`)."""
    import drafting as benchmark

    batches, tokens, rounds = ((1, 4, 16), 192, 5) if device == "cuda" else ((1,), 16, 1)
    dtype = "bfloat16" if device == "cuda" else "float32"
    lookup = dict(prompt_lookup_max=4, prompt_lookup_min=2)
    ways = {
        "plain": None,
        "n-gram, k = 3": dict(method="ngram", num_speculative_tokens=3, **lookup),
        "exit after 2, k = 2": dict(
            method="early_exit", exit_layer=2, num_speculative_tokens=2
        ),
    }
    if device == "cpu":
        del ways["n-gram, k = 3"]
    # The wide model of drafting.py; a dry run takes the narrow one that it is made of.
    model = str(benchmark.inflated() if device == "cuda" else MODEL)
    prompts = random_prompts((benchmark.PROMPT,) * max(batches))
    workers = {name: worker(device, "v1", benchmark.__file__) for name in ways}
    rows = []
    try:
        for name, speculative in ways.items():
            workers[name].call(
                "start", model=model, dtype=dtype, eager=device == "cpu",
                speculative=speculative,
            )  # fmt: skip
        for batch in batches:
            found = {name: [] for name in ways}
            for n in range(rounds + 1):
                for name, engine in workers.items():
                    found[name].append(
                        engine.call(
                            "generate", prompts=prompts[:batch], tokens=tokens,
                            temperature=0.0, seed=n,
                        )
                    )  # fmt: skip
            plain = [one["seconds"] for one in found["plain"]][1:]
            for name, results in found.items():
                _, drafted, accepted = sum(one["counts"] for one in results[1:])
                ratios = [a / b["seconds"] for a, b in zip(plain, results[1:])]
                share = f"{accepted / drafted:.2f}" if drafted else ""
                rate = batch * tokens / statistics.median(plain)
                rows.append([batch, name, share, processes.ratio(ratios), f"{rate:.0f}"])
    finally:
        for engine in workers.values():
            engine.__exit__()
    columns = ["batch", "way", "accepted", "times as fast", "plain, tokens a second"]
    title = f"Drafting, greedy, {dtype}, no calibration"
    tables = [{"title": title, "columns": columns, "rows": rows}]
    return {"tables": tables, "problems": []}


def memory(device: str) -> dict:
    """Peak memory of scoring a long prompt above prefill (`peak_memory.py`)."""
    rows = 8192 if device == "cuda" else 64
    vocabulary = peak_memory.VOCABULARY if device == "cuda" else 2048
    model = str(processes.random_llama(vocabulary, 128, 1, "float32"))
    peak_memory.VOCABULARY = vocabulary
    table, problems = [], []
    for runner in ("v1", "v2"):
        peaks = {}
        with worker(device, runner, GPU_DAY_VOCABULARY=str(vocabulary)) as engine:
            engine.call("start", model=model, rows=rows, step=2048)
            for way in ("prefill", "target_token_ids"):
                engine.call("run", way=way, rows=32)
                peaks[way] = engine.call("run", way=way, rows=rows)["peak"]
        above = peaks["target_token_ids"] - peaks["prefill"]
        if above > peak_memory.BOUND * 2**20:
            problems.append(f"{runner.upper()}: {above / 2**20:.0f} MiB above prefill")
        mebibytes = [f"{n / 2**20:,.0f}" for n in (peaks["prefill"], above)]
        table.append([runner.upper(), *mebibytes])
    columns = ["runner", "prefill, MiB", "scoring above it, MiB"]
    title = f"Peak memory, {rows:,} rows × {vocabulary:,} words; at most {peak_memory.BOUND}"
    tables = [{"title": title, "columns": columns, "rows": table}]
    return {"tables": tables, "problems": problems}


def lm_eval(device: str) -> dict:
    """lm-eval with model `utio` against its own `vllm` model (`lm_eval_speed.py`)."""
    from types import SimpleNamespace

    import lm_eval_speed

    if device == "cuda":  # the work is not this process's
        lm_eval_speed.time = SimpleNamespace(process_time=time.perf_counter)
    questions, repeat, block = (16, 5, 16) if device == "cuda" else (1, 1, 32)
    args = SimpleNamespace(
        block_size=block, case=["same shots"], questions=questions, repeat=repeat
    )
    found = lm_eval_speed.measure_model(lm_eval_speed.REFERENCE, args)["same shots"]
    rows = [
        [path, f"{statistics.median(times):.2f}", processes.ratio(found["speedup"][path])]
        for path, times in found["seconds"].items()
    ]
    columns = ["path", "seconds", "times as fast as lm-eval's"]
    title = f"lm-eval, 16 shots, {found['requests']} requests, the same answers"
    tables = [{"title": title, "columns": columns, "rows": rows}]
    return {"tables": tables, "problems": []}


PARTS = dict(
    scoring=scoring, exactness=exactness, routing=routing, drafting=drafting,
    memory=memory, lm_eval=lm_eval,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    args.json.write_text(json.dumps(PARTS[args.part](args.device), default=str))


if __name__ == "__main__":
    named = os.environ.get("GPU_DAY_VOCABULARY", peak_memory.VOCABULARY)
    peak_memory.VOCABULARY = int(named)
    processes.main(main, Engine)
