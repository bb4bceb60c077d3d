# SPDX-License-Identifier: Apache-2.0
"""inflate_cal.py SOURCE TARGET TIMES: the calibration of fit.py for an inflated model."""
import sys, math, torch
from safetensors import safe_open
from safetensors.torch import save_file
src, dst, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
with safe_open(src, "pt") as f:
    meta = f.metadata(); t = {k: f.get_tensor(k) for k in f.keys()}
h0 = int(meta["hidden_size"]); h = h0 * times; s = math.sqrt(1 / times)
def pad(x, *shape):
    y = x.new_zeros(shape); y[tuple(slice(m) for m in x.shape)] = x
    return y.contiguous()
n = len(t["translator_weight"])
q = {}
for kind in ("sampled", "greedy"):
    w = t[f"stop_{kind}_weight_1"]
    q[f"stop_{kind}_weight_1"] = pad(w * s, n, w.shape[1], h)
    for k in ("bias_1", "weight_2", "bias_2"): q[f"stop_{kind}_{k}"] = t[f"stop_{kind}_{k}"]
q["translator_weight"] = pad(t["translator_weight"] * s, n, h, h)
q["translator_bias"] = pad(t["translator_bias"], n, h)
q["translator_weight_1"] = pad(t["translator_weight_1"] * s, n, h, h)  # as wide as the model
q["translator_bias_1"] = pad(t["translator_bias_1"], n, h)
q["translator_weight_2"] = pad(t["translator_weight_2"], n, h, h)
meta["hidden_size"] = str(h)
save_file(q, dst, metadata=meta)
