# SPDX-License-Identifier: Apache-2.0
"""What routing by depth costs in quality, in real routed decoding.

    .venv/bin/python benchmarks/depth_quality.py

Held-out text is forced through decode, token by token, in a batch, and the model's own
log-probability of each forced token is recorded. So a wrong step does not change what
comes after it, except through the keys and values that routed tokens leave behind, which
is the effect under test. Policies are compared at equal mean depth with random routing
and with the same depth for every token.
"""

import argparse
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "examples" / "reference_model")]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

import numpy as np
import torch
from corpus import read
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.depth_policy import CalibratedProbe, ShareByRank, Threshold


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


class Random(ShareByRank):
    """The default policy with scores that know nothing."""

    generator = torch.Generator().manual_seed(0)

    def assign(self, scores, req_ids):
        return super().assign(
            torch.rand(len(req_ids), generator=self.generator), req_ids
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, default=ROOT / "examples/reference_model/model"
    )
    parser.add_argument(
        "--archive", type=Path, default=ROOT / "build/downloads/vllm-0.32.0.tar.gz",
        help="vLLM's source archive, whose held-out files are the text",
    )  # fmt: skip
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--forced-length", type=int, default=192)
    parser.add_argument(
        "--cutoff", type=int, nargs="+", default=[6], help="early exits to try, singly"
    )
    parser.add_argument(
        "--share", type=float, nargs="+", default=[0.3, 0.5, 0.7],
        help="shares of the tokens that leave early",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, help="of examples/utio_calibrate.py, for a probe"
    )
    return parser.parse_args()


def texts(args: argparse.Namespace, tokenizer) -> np.ndarray:
    """int64 `[sequences, prompt + forced]`: windows of the held-out files."""
    length = args.prompt_length + args.forced_length
    ids = [tokenizer(text)["input_ids"] for text in read(args.archive, True).values()]
    windows = [row[:length] for row in ids if len(row) >= length]
    if len(windows) < args.sequences:
        sys.exit(f"the text has {len(windows)} windows, not {args.sequences}")
    return np.array(windows[: args.sequences])


def measure(llm: LLM, windows: np.ndarray, prompt_length: int, max_depth=None):
    """Log-probability of each forced token and the model's own choice.

    Returns:
        float64 and int64 `[sequences, forced]`, and the mean depth of decode tokens.
    """
    prompts = [
        TokensPrompt(prompt_token_ids=w[:prompt_length].tolist()) for w in windows
    ]
    forced = windows[:, prompt_length:]
    params = [
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
    ]
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    logprobs = np.empty(forced.shape)
    greedy = np.empty(forced.shape, dtype=np.int64)
    for row, output in enumerate(outputs):
        assert list(output.token_ids) == forced[row].tolist()
        for column, found in enumerate(output.logprobs):
            logprobs[row, column] = found[forced[row, column]].logprob
            greedy[row, column] = next(t for t, lp in found.items() if lp.rank == 1)
    depth = np.mean([o.mean_decode_depth or math.nan for o in outputs])
    # The first token comes from the prompt, at full depth.
    return logprobs[:, 1:], greedy[:, 1:], depth


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)

    # An engine that is collected takes the process groups of the next one with it.
    engines = []

    def engine(**options) -> LLM:
        engines.append(
            LLM(
                str(args.model),
                dtype="float32",
                enforce_eager=True,
                max_num_seqs=args.sequences,
                max_model_len=args.prompt_length + args.forced_length,
                max_num_batched_tokens=8192,
                kv_cache_memory_bytes=2**28,
                logits_processors=[ForcedTokens],
                **options,
            )
        )
        return engines[-1]

    plain = engine()
    num_layers = plain.llm_engine.model_config.get_total_num_hidden_layers()
    windows = texts(args, plain.get_tokenizer())
    base_logprobs, base_greedy, _ = measure(plain, windows, args.prompt_length)
    base = math.exp(-base_logprobs.mean())
    table = Table(
        "early exit", "policy", "mean depth", "perplexity", "rise", "agreement"
    )
    table.add_row("", "full depth", "1.000", f"{base:.3f}", "", "")

    def add(cutoff, name, logprobs, greedy, depth) -> None:
        perplexity = math.exp(-logprobs.mean())
        agreement = (greedy == base_greedy).mean()
        table.add_row(
            str(cutoff), name, f"{depth / num_layers:.3f}", f"{perplexity:.3f}",
            f"{perplexity / base - 1:+.1%}", f"{agreement:.3f}",
        )  # fmt: skip

    def routed(cutoff: int, policy: type, share: float, **options):
        llm = engine(
            enable_utio=True, utio_bucket_cutoffs=[cutoff], utio_min_batch_size=1,
            utio_bucket_shares=[share, 1 - share],
            utio_policy=f"{policy.__module__}.{policy.__qualname__}", **options,
        )  # fmt: skip
        return measure(llm, windows, args.prompt_length)

    calibrated = dict(utio_calibration=str(args.calibration))
    entropy = dict(utio_score_weights=[1.0, 0.0, 0.0])
    for cutoff in tqdm(args.cutoff):
        for share in tqdm(args.share, leave=False):
            add(cutoff, f"random, {share:.0%}", *routed(cutoff, Random, share))
            add(cutoff, f"TIS, {share:.0%}", *routed(cutoff, ShareByRank, share))
            if args.calibration:
                probed = routed(cutoff, CalibratedProbe, share, **calibrated)
                add(cutoff, f"calibrated probe, {share:.0%}", *probed)
            by_entropy = routed(cutoff, ShareByRank, share, **entropy)
            add(cutoff, f"its entropy alone, {share:.0%}", *by_entropy)
        # A threshold sets the depth itself; random routing then gets the same one.
        for name, options in (("TIS", {}), ("entropy", entropy)):
            found = routed(cutoff, Threshold, 0.5, **options)
            add(cutoff, f"{name}, threshold", *found)
            share = (num_layers - found[2]) / (num_layers - cutoff)
            add(cutoff, f"random, {share:.1%}", *routed(cutoff, Random, share))
        llm = engine(enable_utio=True, utio_bucket_cutoffs=[cutoff])
        uniform = measure(llm, windows, args.prompt_length, max_depth=cutoff)
        add(cutoff, "all tokens", *uniform)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
