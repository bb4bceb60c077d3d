# SPDX-License-Identifier: Apache-2.0
"""Scoring the ends of prompts that share a prefix, against the unpatched release.

    taskset -c 0 .venv/bin/python benchmarks/shared_prefix.py

64 prompts of 2,048 tokens share the first 1,792; the other 256 are scored. The fork is
given `target_token_ids`, the release `prompt_logprobs=0` (V1) or
`prompt_logprob_token_ids` (V2) and its defaults. The prefix cache is emptied before
each round, so each round of the fork prefills the prefix once. Both engines are
started, then take turns. The bound counts the tokens that are prefilled: 64 prompts of
2,048 against one prefix and 64 ends, each a block longer to compute the token before
the first scored. On V1 the release also puts all rows through the head, not the scored
ones alone, so the ratio can exceed it where the head is a large part of the model.
"""

import argparse
import time

import numpy as np
import processes
from processes import Worker

BLOCK = 32


class Engine:
    """In the worker."""

    def start(self, model: str, dtype: str, length: int) -> str:
        self.llm, file = processes.start_llm(
            model, dtype, length + 1, skip_tokenizer_init=True, block_size=BLOCK
        )
        return file

    def score(self, prompts: list[list[int]], scored: int, way: str) -> dict:
        """Scores the last tokens of the prompts.

        Args:
            way: `named`, `uncached` (the same, without reading the cache), or
                upstream's `prompt_logprobs` or `prompt_logprob_token_ids`.

        Returns:
            Seconds, log-probabilities `[prompts, scored]`, cached tokens a prompt.
        """
        from vllm import SamplingParams, TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        fields = {"max_tokens": 1, "detokenize": False}
        if way in ("named", "uncached"):
            for request, ids in zip(requests, prompts):
                request["target_token_ids"] = ids[-scored:]
            fields |= {"max_tokens": 0}
            fields |= {"skip_reading_prefix_cache": way == "uncached"}
            params = SamplingParams(**fields)
        elif way == "prompt_logprobs":
            params = SamplingParams(prompt_logprobs=0, **fields)
        else:
            params = [
                SamplingParams(
                    prompt_logprob_token_ids=[[token] for token in ids[-scored:]],
                    prompt_logprob_start=len(ids) - scored - 1,
                    **fields,
                )
                for ids in prompts
            ]
        assert self.llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if way in ("named", "uncached"):
            logprobs = [o.target_logprobs.logprobs[:, 0] for o in outputs]
        elif way == "prompt_logprobs":
            logprobs = [
                [entry[i].logprob for entry, i in zip(o.prompt_logprobs[-scored:],
                                                      ids[-scored:])]
                for o, ids in zip(outputs, prompts)
            ]  # fmt: skip
        else:
            logprobs = [o.prompt_token_id_logprobs[:, 0] for o in outputs]
        return {
            "seconds": seconds,
            "logprobs": np.array(logprobs, np.float32),
            "cached": [o.num_cached_tokens or 0 for o in outputs],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    model = processes.random_llama(
        args.vocabulary, args.hidden, args.layers, args.dtype
    )
    shared = args.length - args.scored
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, args.vocabulary, shared).tolist()
    ends = rng.integers(0, args.vocabulary, (args.prompts, args.scored)).tolist()
    prompts = [prefix + end for end in ends]
    start = {"model": str(model), "dtype": args.dtype, "length": args.length}
    job = {"prompts": prompts, "scored": args.scored}
    theirs = "prompt_logprobs" if args.runner == "v1" else "prompt_logprob_token_ids"

    fork, upstream = [], []
    with (
        Worker(__file__, args.runner) as ours,
        Worker(__file__, args.runner, upstream=True) as other,
    ):
        assert ours.call("start", **start) != other.call("start", **start)
        for worker, way in ((ours, "named"), (other, theirs)):
            worker.call("score", prompts=prompts[:2], scored=args.scored, way=way)
        for _ in range(args.rounds):
            fork.append(ours.call("score", way="named", **job))
            upstream.append(other.call("score", way=theirs, **job))
        uncached = ours.call("score", way="uncached", **job)

    last = fork[-1]
    cached = (shared - 1) // BLOCK * BLOCK
    assert last["cached"][1:] == [cached] * (args.prompts - 1), last["cached"]
    assert uncached["cached"] == [0] * args.prompts
    missing = {
        name: args.prompts * args.scored - int(np.isfinite(x["logprobs"]).sum())
        for name, x in (("fork", last), ("upstream", upstream[-1]))
    }
    differences = {
        name: float(np.abs(last["logprobs"] - x["logprobs"]).max())
        for name, x in (("uncached", uncached), ("upstream", upstream[-1]))
    }
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(fork, upstream)]
    bound = args.prompts * args.length / (
        args.length + (args.prompts - 1) * (args.length - cached)
    )  # fmt: skip
    rows = [
        ["unpatched release, " + theirs, seconds(upstream), "1", missing["upstream"], ""],
        ["fork, not reading the cache", f"{uncached['seconds']:.1f}",
         f"{np.median([x['seconds'] for x in upstream]) / uncached['seconds']:.2f}",
         args.prompts * args.scored - int(np.isfinite(uncached["logprobs"]).sum()),
         f"{differences['uncached']:.1e}"],
        ["fork", seconds(fork), processes.ratio(ratios), missing["fork"], ""],
        ["bound of the tokens", "", f"{bound:.2f}", "", ""],
    ]  # fmt: skip
    processes.show(
        f"shared_prefix_{args.runner}_{args.dtype}",
        f"{args.prompts} prompts of {args.length:,} tokens that share {shared:,}, "
        f"{args.scored} scored ({args.runner.upper()}, {args.dtype}, {args.layers} "
        f"layers of {args.hidden}, {args.vocabulary:,} words)",
        ["", "seconds", "throughput, times the release's", "rows missing",
         "greatest difference from the fork, nats"],
        rows,
        arguments=vars(args),
        fork_seconds=[x["seconds"] for x in fork],
        upstream_seconds=[x["seconds"] for x in upstream],
        ratios=ratios,
        bound=bound,
        missing=missing,
        differences=differences,
    )  # fmt: skip
    print(f"Greatest difference from the release: {differences['upstream']:.1e} nats")


def seconds(rounds: list[dict]) -> str:
    values = [x["seconds"] for x in rounds]
    return f"{np.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    processes.main(main, Engine)
