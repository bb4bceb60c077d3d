# SPDX-License-Identifier: Apache-2.0
"""Times of the parts: MLP and linear layers by rows, head, translator, probe, rejection sampling."""
import torch, statistics
from spike import *
from vllm.forward_context import set_forward_context
from vllm import SamplingParams
model, cal = sys.argv[1:3]
llm = start(model, "bfloat16", calibration=cal, max_num_seqs=16, max_model_len=512, kv_cache_memory_bytes=2**28)
r = runner(llm); d = r.drafter; inner = r.model.model
H = r.model.config.hidden_size
def t(f, n=20):
    f(); out = []
    for _ in range(n):
        b = time.perf_counter(); f(); out.append(time.perf_counter() - b)
    return 1e3 * statistics.median(out)
rows = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
with torch.inference_mode():
  for rep in range(2):
    res = {n: [] for n in rows}
    for n in rows:
        x = torch.randn(n, H).bfloat16()
        def linears():
            for l in inner.layers:
                l.self_attn.qkv_proj(x); l.self_attn.o_proj(x); l.mlp(x)
        def two():
            for l in inner.layers[:2]:
                l.self_attn.qkv_proj(x); l.self_attn.o_proj(x); l.mlp(x)
        print(f"rows {n:3d}: linears of 12 layers {t(linears, 8):.2f} ms, of 2 {t(two):.2f}, head {t(lambda: r.model.compute_logits(x)):.2f}, translator+norm+head {t(lambda: d.head(x)):.2f}, probe {t(lambda: d.probes[2, 'sampled'](x.float())):.3f}", flush=True)
