# SPDX-License-Identifier: Apache-2.0
"""What the measurements share: one engine whose drafter is changed between runs."""
import sys, time, json, random
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/reference_model"))
REFERENCE = ROOT / "examples/reference_model/model"
ARCHIVE = ROOT / "build/downloads/vllm-0.32.0.tar.gz"


def start(model, dtype, spec=True, calibration=None, max_drafts=6, **kw):
    from vllm import LLM
    if spec is True:
        spec = dict(method="early_exit", exit_layer=2, num_speculative_tokens=max_drafts,
                    draft_sample_method="probabilistic")
        if calibration:
            spec["exit_calibration"] = str(calibration)
    opts = dict(dtype=dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=64,
                max_num_batched_tokens=4096, kv_cache_memory_bytes=2**30, seed=0,
                enable_prefix_caching=False, disable_log_stats=True)
    opts |= kw
    if spec:
        opts["speculative_config"] = spec
    return LLM(model=str(model), **opts)


def runner(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def setup(llm, exit_layer=2, k=0, threshold=0.0, reuse=True, greedy_drafts=False, translate=True):
    d = runner(llm).drafter
    d.exit_layer, d.num_drafts, d.threshold, d.reuse = exit_layer, k, threshold, reuse
    d.greedy_drafts, d.translate = greedy_drafts, translate
    return d


def prompts(tokenizer, count, length, held_out=True, seed=0):
    """`count` windows of `length` tokens, each of another file."""
    from corpus import read
    texts = [t for t in read(ARCHIVE, held_out).values() if len(t) > 2000]
    rng = random.Random(seed)
    rng.shuffle(texts)
    out = []
    i = 0
    while len(out) < count:
        t = texts[i % len(texts)]; i += 1
        begin = rng.randrange(0, max(1, min(len(t) - 1500, 20000)))
        ids = tokenizer(t[begin:begin + 2000], add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            out.append(ids[:length])
    return out
