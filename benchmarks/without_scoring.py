# SPDX-License-Identifier: Apache-2.0
"""Generation without a scoring request: this fork against the unpatched release.

    .venv/bin/python benchmarks/without_scoring.py

One process of each, on the same cores, which generate the same batch by turns, fork
first in one round and the release first in the next; a pair of rounds gives one ratio
of times. Processes are started anew a few times, since two of the same program differ
too. The tokens must be the same in every round. `release / release` is the same
measurement of two processes of the release: what the method can not tell apart.
"""

import argparse
import statistics
import sys
import time

import numpy as np
import processes
from processes import Worker


class Engine:
    """In the worker."""

    def start(self, model: str, dtype: str) -> str:
        import vllm

        self.llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=64,
            kv_cache_memory_bytes=2**28,
            enable_prefix_caching=False,
        )
        return vllm.__file__

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        """Seconds, and the greedy token ids `[prompts, tokens]`."""
        from vllm import SamplingParams, TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "token_ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runner", nargs="+", default=["v1", "v2"])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8, help="of each process")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    vocabulary = 32_000
    model = processes.random_llama(vocabulary, args.hidden, args.layers, args.dtype)
    prompts = np.random.default_rng(0).integers(0, vocabulary, (args.prompts, 128))
    job = {"prompts": prompts.tolist(), "tokens": args.tokens}
    start = {"model": str(model), "dtype": args.dtype}
    rows, ratios, different = [], {}, 0
    for runner in args.runner:
        for name, upstream in (("fork / release", False), ("release / release", True)):
            found = []
            for _ in range(args.processes):
                pairs = measure(runner, upstream, start, job, args.rounds)
                found += [a["seconds"] / b["seconds"] for a, b in pairs]
                different += sum(a["token_ids"] != b["token_ids"] for a, b in pairs)
            low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
            rows.append([runner.upper(), name, len(found), f"{middle:.3f}",
                         f"{low:.3f} to {high:.3f}",
                         f"{min(found):.3f} to {max(found):.3f}"])  # fmt: skip
            ratios[f"{runner}, {name}"] = found
            print(*rows[-1], file=sys.stderr, flush=True)
    count = args.prompts * args.tokens
    processes.show(
        "without_scoring",
        f"Time to generate {count:,} tokens for {args.prompts} prompts of 128, no "
        "scoring request",
        ["runner", "ratio of times", "pairs", "median", "middle half", "all"],
        rows,
        arguments=vars(args),
        ratios=ratios,
        rounds_with_other_tokens=different,
    )
    print(f"Rounds whose tokens differ: {different}")
    sys.exit(different > 0)


def measure(
    runner: str, upstream: bool, start: dict, job: dict, rounds: int
) -> list[tuple[dict, dict]]:
    """Pairs of answers of a process (of the fork, or of the release) and of another,
    of the release; whichever goes first in one round is second in the next."""
    with (
        Worker(__file__, runner, upstream=upstream) as one,
        Worker(__file__, runner, upstream=True) as other,
    ):
        same = one.call("start", **start) == other.call("start", **start)
        assert same == upstream
        for worker in (one, other):
            worker.call("generate", **job)
        pairs = []
        for number in range(rounds):
            order = (one, other) if number % 2 == 0 else (other, one)
            answers = {worker: worker.call("generate", **job) for worker in order}
            pairs.append((answers[one], answers[other]))
        return pairs


if __name__ == "__main__":
    processes.main(main, Engine)
