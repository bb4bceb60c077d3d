# SPDX-License-Identifier: Apache-2.0
"""As oracle_sampled.py, in waves of 64, so that every step but the first is resumed."""
import torch
from collections import Counter
from scipy.stats import chi2
from spike import *
from vllm import SamplingParams
from vllm.v1.spec_decode.early_exit import SPENT
from transformers import AutoModelForCausalLM
cal, waves = sys.argv[1], int(sys.argv[2])
llm = start(REFERENCE, "float32", calibration=cal, max_num_seqs=64, max_model_len=256)
tok = llm.get_tokenizer()
hf = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
def nxt(ids):
    with torch.no_grad(): return hf(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
best = max(prompts(tok, 200, 24, seed=5), key=lambda p: nxt(p).max().item())
t1 = int(nxt(best).argmax()); best = best + [t1]  # the token sampled by the prefill is then the second
def chi(observed, p, name):
    n = sum(observed.values()); exp = p * n
    big = (exp >= 8).nonzero()[:, 0].tolist()
    stat = sum((observed[i] - exp[i].item()) ** 2 / exp[i].item() for i in big)
    rest_e = n - sum(exp[i].item() for i in big); rest_o = n - sum(observed[i] for i in big)
    stat += (rest_o - rest_e) ** 2 / max(rest_e, 1e-9)
    print(f"   {name}: n {n}, bins {len(big) + 1}, chi2 {stat:.1f}, p {chi2.sf(stat, len(big)):.3f}", flush=True)
for kw in [dict(exit_layer=2, k=2), dict(exit_layer=2, k=3, threshold=.3)]:
    setup(llm, **kw); SPENT.clear(); torch.manual_seed(11)
    sp = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, detokenize=False)
    rows = []
    for _ in range(waves):
        rows += [tuple(o.outputs[0].token_ids) for o in llm.generate([dict(prompt_token_ids=best)] * 64, sp, use_tqdm=False)]
    print(kw, "drafts", int(SPENT["drafts"]), "resumed", int(SPENT["resumed"]), "of", int(SPENT["calls"]), "mismatch", int(SPENT["mismatch"]))
    prefix = list(best)
    for name in ("first (prefill)", "second (verified)", "third (verified)"):
        depth = len(prefix) - len(best)
        some = [r for r in rows if list(r[:depth]) == prefix[len(best):]]
        count = Counter(r[depth] for r in some)
        chi(count, nxt(prefix), name)
        prefix.append(count.most_common(1)[0][0])
