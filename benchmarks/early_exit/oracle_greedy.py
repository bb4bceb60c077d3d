# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens with every kind of drafting against plain decoding; float32."""
import torch
from spike import *
from vllm import SamplingParams
from vllm.v1.spec_decode.early_exit import SPENT
import os
cal = sys.argv[1] if len(sys.argv) > 1 else None
model = sys.argv[2] if len(sys.argv) > 2 else REFERENCE
N = int(os.environ.get("N", "96"))
llm = start(model, "float32", calibration=cal, max_num_seqs=8, max_model_len=256)
tok = llm.get_tokenizer()
ps = [dict(prompt_token_ids=p[: 8 + i]) for i, p in enumerate(prompts(tok, 40, 64))]
sp = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True, logprobs=2)
def run():
    outs = llm.generate(ps, sp, use_tqdm=False)
    return [o.outputs[0] for o in outs]
setup(llm, k=0)
plain = run()
import vllm; plainer = None
for kw in [dict(exit_layer=2, k=1, reuse=False), dict(exit_layer=2, k=3, reuse=False), dict(exit_layer=2, k=1),
           dict(exit_layer=2, k=3), dict(exit_layer=6, k=4), dict(exit_layer=11, k=4), dict(exit_layer=3, k=2, translate=False)] + (
           [dict(exit_layer=2, k=4, threshold=t, reuse=r) for t in (.2, .5, .8) for r in (True, False)] if cal else []):
    setup(llm, **kw); SPENT.clear()
    got = run()
    same = ties = bad = 0
    for a, b in zip(plain, got):
        if list(a.token_ids) == list(b.token_ids): same += 1; continue
        i = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y)
        lp = sorted((v.logprob for v in a.logprobs[i].values()), reverse=True)
        if lp[0] - lp[1] < 1e-4: ties += 1
        else: bad += 1; print("   differs at", i, lp[:2], a.token_ids[i], b.token_ids[i])
    print(kw, "same", same, "ties", ties, "BAD", bad, "passes", int(SPENT["passes"]), "drafts", int(SPENT["drafts"]),
          "resumed", int(SPENT["resumed"]), "mismatch", int(SPENT["mismatch"]), "tokens", sum(len(g.token_ids) for g in got), flush=True)
