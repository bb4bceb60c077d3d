# SPDX-License-Identifier: Apache-2.0
"""The most probable tokens of every prompt position, against the unpatched release.

    taskset -c 0 .venv/bin/python benchmarks/teacher.py

What a teacher gives to its student: the `k` most probable tokens of each position and
their log-probabilities. The fork is given `target_top_k=k` (for 0, the prompt's own
tokens by `target_token_ids`), the release `prompt_logprobs=k`, with and without decoding
the tokens to text. The fork also says how probable all other tokens are together. Both
engines are started, then take turns; the prefix cache is emptied before each round. The
values are compared: those of the release that are among the first `k`.
"""

import argparse
import statistics
import tempfile
import time

import numpy as np
import processes
from processes import Worker


class Engine:
    """In the worker."""

    def start(
        self, model: str, tokenizer: str, dtype: str, length: int, most: int
    ) -> str:
        self.llm, file = processes.start_llm(
            model, dtype, length + 1, tokenizer=tokenizer, max_logprobs=most
        )
        return file

    def score(self, prompts: list[list[int]], k: int, way: str) -> dict:
        """Scores all positions of the prompts but the first.

        Args:
            way: `arrays`, or upstream's `objects`, or `text`, which are decoded.

        Returns:
            Seconds, and the `k` greatest log-probabilities, `[prompts, rows, k]`.
        """
        from vllm import SamplingParams, TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        if way == "arrays":
            for request, ids in zip(requests, prompts):
                request |= {"target_top_k": k} if k else {"target_token_ids": ids[1:]}
            params = SamplingParams(max_tokens=0)
        else:
            params = SamplingParams(
                max_tokens=1, prompt_logprobs=k, detokenize=way == "text"
            )
        assert self.llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if way == "arrays":
            found = [o.target_logprobs.top_logprobs for o in outputs if k]
        else:
            found = [
                [sorted((x.logprob for x in row.values()), reverse=True)[:k]
                 for row in o.prompt_logprobs[1:]]
                for o in outputs
            ]  # fmt: skip
        return {"seconds": seconds, "logprobs": np.array(found, np.float32)}


def make_tokenizer(vocabulary: int):
    """Of as many words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f"▁word{n}": n for n in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁word0"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="▁word1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--top-k", nargs="+", type=int, default=[0, 8, 64, 256])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
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
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, args.vocabulary, (args.prompts, args.length)).tolist()
    start = {"model": str(model), "dtype": args.dtype, "length": args.length}
    num_rows = args.prompts * (args.length - 1)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Worker(__file__, args.runner) as ours,
        Worker(__file__, args.runner, upstream=True) as theirs,
    ):
        make_tokenizer(args.vocabulary).save_pretrained(folder)
        start["tokenizer"] = folder
        paths = {
            worker.call("start", most=max(args.top_k), **start)
            for worker in (ours, theirs)
        }
        assert len(paths) == 2
        for k in args.top_k:
            job = {"prompts": prompts, "k": k}
            ways = [(ours, "arrays"), (theirs, "objects"), (theirs, "text")]
            times: dict[str, list[float]] = {way: [] for _, way in ways}
            found = {}
            for turn in range(args.rounds + 1):
                for worker, way in ways:
                    answer = worker.call("score", way=way, **job)
                    found[way] = answer["logprobs"]
                    if turn:  # the first compiles
                        times[way].append(answer["seconds"])
            off = max(
                np.abs(found["arrays"] - found[way]).max(initial=0)
                for way in ("objects", "text")
                if k
            ) if k else 0.0  # fmt: skip
            ratios = {
                way: [b / a for a, b in zip(times["arrays"], times[way])]
                for way in ("objects", "text")
            }
            rate = num_rows / statistics.median(times["arrays"])
            rows.append(
                [k, f"{rate:,.0f}"]
                + [
                    f"{num_rows / statistics.median(times[way]):,.0f}, "
                    f"{statistics.median(ratios[way]):.1f} ({min(ratios[way]):.1f} to "
                    f"{max(ratios[way]):.1f})"
                    for way in ("objects", "text")
                ]
                + [f"{off:.1e}"]
            )
    processes.show(
        f"teacher_{args.runner}_{args.dtype}",
        f"Rows a second of {args.prompts} prompts of {args.length}, and how many times "
        "as many the fork gives",
        ["k", "arrays", "release, token ids", "release, decoded", "greatest |Δ|, nats"],
        rows,
    )


if __name__ == "__main__":
    processes.main(main, Engine)
