# SPDX-License-Identifier: Apache-2.0
"""Peak resident memory of scoring a long prompt, above that of plain prefill.

    .venv/bin/python benchmarks/peak_memory.py

One prompt of 8,193 tokens, a vocabulary of 128,256, every token but the first scored.
Each number is a process of its own, which has run a shorter prompt of the same kind
before; then the kernel's high-water mark of resident memory (VmHWM) is reset, the
prompt runs, and the mark is read. "Above prefill" is the difference of two such marks,
so it holds all that scoring adds: logits, results, Python objects. The model is one
layer of width 128, so that the head's own product takes little time. Where the logits
that upstream makes would not fit the memory that is free, it is not run.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import processes
from processes import Worker

VOCABULARY = 128_256
BOUND = 256  # MiB above prefill
WAYS = {  # what is asked for -> which vLLM has it, on which runners
    "target_token_ids": ("fork", ("v1", "v2")),
    "prompt_logprobs=0": ("upstream", ("v1",)),
    "prompt_logprob_token_ids": ("upstream", ("v2",)),
}


class Engine:
    """In the worker."""

    def start(self, model: str, rows: int, step: int) -> None:
        from vllm import LLM

        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=rows + 2,
            max_num_batched_tokens=step,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**26,
            enable_prefix_caching=False,
        )

    def run(self, way: str, rows: int) -> dict:
        """Peak and size before, in bytes, of prefilling `rows + 1` tokens and
        scoring them `way`."""
        from vllm import SamplingParams, TokensPrompt

        tokens = np.random.default_rng(0).integers(0, VOCABULARY, rows + 1).tolist()
        request = TokensPrompt(prompt_token_ids=tokens)
        fields = {"max_tokens": 1, "detokenize": False}
        if way == "target_token_ids":
            request["target_token_ids"] = tokens[1:]
            fields["max_tokens"] = 0
        elif way == "prompt_logprobs=0":
            fields["prompt_logprobs"] = 0
        elif way == "prompt_logprob_token_ids":
            fields["prompt_logprob_token_ids"] = [[token] for token in tokens[1:]]
        params = SamplingParams(**fields)
        # The mark falls to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        (output,) = self.llm.generate([request], params, use_tqdm=False)
        peak = memory("VmHWM")
        scores = {
            "prefill": lambda: np.zeros(rows),
            "target_token_ids": lambda: output.target_logprobs.logprobs,
            "prompt_logprob_token_ids": lambda: output.prompt_token_id_logprobs,
            "prompt_logprobs=0": lambda: np.array(
                [next(iter(e.values())).logprob for e in output.prompt_logprobs[1:]]
            ),
        }[way]()
        assert scores.size == rows and np.isfinite(scores).all()
        return {"peak": peak, "before": before}


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(runner: str, upstream: bool, way: str, rows: int, step: int) -> dict:
    model = processes.random_llama(VOCABULARY, 128, 1, "float32")
    with Worker(__file__, runner, upstream=upstream) as worker:
        worker.call("start", model=str(model), rows=rows, step=step)
        worker.call("run", way=way, rows=32)
        return worker.call("run", way=way, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--step", type=int, nargs="+", default=[2048],
                        help="tokens of one step (--max-num-batched-tokens)")  # fmt: skip
    parser.add_argument("--runner", nargs="+", default=["v1", "v2"])
    parser.add_argument("--only-fork", action="store_true")
    args = parser.parse_args()
    table, results = [], []
    for runner in args.runner:
        for step in args.step:
            plain = measure(runner, False, "prefill", args.rows, step)
            for way, (wheel, its_runners) in WAYS.items():
                if runner not in its_runners or (args.only_fork and wheel != "fork"):
                    continue
                row = [runner.upper(), step, wheel, way]
                needed = 4 * 4 * min(step, args.rows) * VOCABULARY
                if wheel == "upstream" and needed > available():
                    table.append([*row, "not run", "not run"])
                    continue
                result = measure(runner, wheel == "upstream", way, args.rows, step)
                above = result["peak"] - plain["peak"]
                results.append(
                    {"runner": runner, "step": step, "wheel": wheel, "way": way}
                    | {"peak_bytes": result["peak"], "above_prefill_bytes": above}
                    | {"prefill_peak_bytes": plain["peak"]}
                )
                table.append([*row, mebibytes(plain["peak"]), mebibytes(above)])
                print(*table[-1], file=sys.stderr, flush=True)
    processes.show(
        "peak_memory",
        f"Peak memory of scoring {args.rows:,} rows × {VOCABULARY:,} words, at most "
        f"{BOUND} MiB above prefill is the goal",
        ["runner", "tokens a step", "vLLM", "way", "prefill, MiB", "above it, MiB"],
        table,
        results=results,
    )


def available() -> int:
    """Memory in bytes that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say what memory is available")


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


if __name__ == "__main__":
    processes.main(main, Engine)
