# SPDX-License-Identifier: Apache-2.0
"""Linears of all layers by rows, interleaved."""
import torch, statistics
from spike import *
model, cal = sys.argv[1:3]
llm = start(model, "bfloat16", calibration=cal, max_num_seqs=16, max_model_len=512, kv_cache_memory_bytes=2**28)
inner = runner(llm).model.model; H = inner.config.hidden_size
rows = (1, 2, 3, 4, 6, 8, 9, 12, 16)
xs = {n: torch.randn(n, H).bfloat16() for n in rows}
out = {n: [] for n in rows}
with torch.inference_mode():
    for rep in range(21):
        for n in rows:
            x = xs[n]; b = time.perf_counter()
            for l in inner.layers:
                l.self_attn.qkv_proj(x); l.self_attn.o_proj(x); l.mlp(x)
            out[n].append(1e3 * (time.perf_counter() - b))
for n in rows:
    q = sorted(out[n][1:]); r = sorted(a / b for a, b in zip(out[n][1:], out[1][1:]))
    print(f"rows {n}: median {statistics.median(q):.2f} ms ({q[2]:.2f} to {q[-3]:.2f}); to one row {statistics.median(r):.2f} ({r[2]:.2f} to {r[-3]:.2f})")
