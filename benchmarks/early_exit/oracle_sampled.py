# SPDX-License-Identifier: Apache-2.0
"""Frequencies of sampled tokens against the target's own distribution, float32."""
import torch
from collections import Counter
from scipy.stats import chi2
from spike import *
from vllm import SamplingParams
from vllm.v1.spec_decode.early_exit import SPENT
from transformers import AutoModelForCausalLM
cal, draws = sys.argv[1], int(sys.argv[2])
llm = start(REFERENCE, "float32", calibration=cal, max_num_seqs=64, max_model_len=256)
tok = llm.get_tokenizer()
hf = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
def nxt(ids):
    with torch.no_grad(): return hf(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
# a prompt whose next token is nearly certain, so that most draws share it
best = max(prompts(tok, 200, 24, seed=5), key=lambda p: nxt(p).max().item())
p1 = nxt(best); t1 = int(p1.argmax()); print("first token", t1, p1.max().item())
p2 = nxt(best + [t1]); print("second: entropy", -(p2 * p2.log()).sum().item(), "max", p2.max().item())
def chi(observed, p, name):
    n = sum(observed.values()); exp = p * n
    big = (exp >= 8).nonzero()[:, 0].tolist()
    stat = sum((observed[i] - exp[i].item()) ** 2 / exp[i].item() for i in big)
    rest_e = n - sum(exp[i].item() for i in big); rest_o = n - sum(observed[i] for i in big)
    stat += (rest_o - rest_e) ** 2 / rest_e
    print(f"   {name}: n {n}, bins {len(big) + 1}, chi2 {stat:.1f}, p {chi2.sf(stat, len(big)):.3f}", flush=True)
for temperature in (1.0, 0.6):
  for kw in [dict(k=0), dict(exit_layer=2, k=3), dict(exit_layer=2, k=3, reuse=False), dict(exit_layer=2, k=4, threshold=.4), dict(exit_layer=1, k=2, threshold=.5), dict(exit_layer=3, k=2, greedy_drafts=True)]:
    setup(llm, **kw); SPENT.clear(); torch.manual_seed(hash(str(kw)) % 2**31)
    sp = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, detokenize=False)
    outs = llm.generate([dict(prompt_token_ids=best)] * draws, sp, use_tqdm=False)
    rows = [tuple(o.outputs[0].token_ids) for o in outs]
    print(temperature, kw, "drafts", int(SPENT["drafts"]), "resumed", int(SPENT["resumed"]), "mismatch", int(SPENT["mismatch"]))
    pow_ = lambda p: (p ** (1 / temperature)) / (p ** (1 / temperature)).sum()
    second = [r for r in rows if r[0] == t1]
    chi(Counter(r[1] for r in second), pow_(p2), "second")
    t2, _ = Counter(r[1] for r in second).most_common(1)[0]
    third = [r for r in second if r[1] == t2]
    chi(Counter(r[2] for r in third), pow_(nxt(best + [t1, t2])), "third")
    t3, _ = Counter(r[2] for r in third).most_common(1)[0]
    chi(Counter(r[3] for r in third if r[2] == t3), pow_(nxt(best + [t1, t2, t3])), "fourth")
