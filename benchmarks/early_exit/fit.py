# SPDX-License-Identifier: Apache-2.0
"""Translators and stop probes for the exits of a small model, fitted on its own samples
and on text; held-out figures.

    fit.py MODEL OUTPUT CUTOFFS TOKENS
"""
import argparse, json
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
from spike import *
sys.path.insert(0, str(ROOT / "examples"))

if __name__ == "__main__":
    model_dir, output, cutoffs, tokens = sys.argv[1], Path(sys.argv[2]), list(map(int, sys.argv[3].split(","))), int(sys.argv[4])
    began = time.time()
    from vllm import SamplingParams
    llm = start(model_dir, "float32", spec=None, max_num_seqs=64, max_model_len=512)
    tok = llm.get_tokenizer()
    count = tokens // 2 // 224
    ps = prompts(tok, count + 60, 32, held_out=False, seed=1)
    sp = SamplingParams(temperature=1.0, max_tokens=224, ignore_eos=True, seed=None, detokenize=False)
    outs = llm.generate([dict(prompt_token_ids=p) for p in ps], sp, use_tqdm=False)
    windows = [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in outs]
    own, own_held = windows[:count], windows[count:]
    text = prompts(tok, tokens // 2 // 256 + 60, 256, held_out=False, seed=2)
    text_held = prompts(tok, 60, 256, held_out=True, seed=3)
    del llm
    fitted = own + text[:-60]
    random.Random(0).shuffle(fitted)
    print("windows", len(own), len(text) - 60, "after", round(time.time() - began), "s", flush=True)

    import utio_calibrate as uc
    uc.EPOCHS = 5
    uc.BATCH = 256
    args = argparse.Namespace(cutoffs=cutoffs, dtype="float32", device="cpu", batch_size=8,
                              translator_width=None, probe_width=256, output=output)
    model = uc.load_model(model_dir, "float32", "cpu")
    exits = uc.Exits(model, cutoffs)
    exits.translators = uc.fit_translators(args, exits, fitted, model.config.hidden_size)
    print("translators after", round(time.time() - began), "s", flush=True)

    @torch.inference_mode()
    def collect(windows, translated=True):
        xs, acc, agree = [], [], []
        for at, ends, full in exits.samples(windows, 8):
            p = model.lm_head(full).float().softmax(-1)
            row_a, row_g = [], []
            for i, x in enumerate(at):
                if translated:
                    q = model.lm_head(model.model.norm(exits.translators[i](x)))
                else:
                    q = model.lm_head(model.model.norm(x))
                q = q.float().softmax(-1)
                row_a.append(torch.minimum(p, q).sum(-1)); row_g.append(p.argmax(-1) == q.argmax(-1))
            xs.append(at.half()); acc.append(torch.stack(row_a)); agree.append(torch.stack(row_g))
        return torch.cat(xs, 1), torch.cat(acc, 1), torch.cat(agree, 1).float()

    data = collect(fitted)
    held = {"own samples": collect(own_held), "held-out text": collect(text_held)}
    plain = {"own samples": collect(own_held, False)[1:], "held-out text": collect(text_held, False)[1:]}
    print("labels after", round(time.time() - began), "s", flush=True)

    def fit_probe(x, y, width=64, epochs=6, linear=False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(x.shape[1], width), nn.GELU(), nn.Linear(width, 1)) if not linear else nn.Linear(x.shape[1], 1)
        opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
        steps = epochs * len(x) // 512
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=steps + 1)
        for _ in range(steps):
            rows = torch.randint(len(x), (512,))
            loss = F.binary_cross_entropy_with_logits(net(x[rows].float())[:, 0], y[rows])
            opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        return net.requires_grad_(False)

    tensors, report = {}, {}
    for kind, col in (("sampled", 1), ("greedy", 2)):
        nets = [fit_probe(data[0][i], data[col][i]) for i in range(len(cutoffs))]
        for name, get in (("weight_1", lambda n: n[0].weight), ("bias_1", lambda n: n[0].bias),
                          ("weight_2", lambda n: n[2].weight[0]), ("bias_2", lambda n: n[2].bias[0])):
            tensors[f"stop_{kind}_{name}"] = torch.stack([get(n) for n in nets]).contiguous()
        for i, c in enumerate(cutoffs):
            lin = fit_probe(data[0][i], data[col][i], linear=True)
            for where, h in held.items():
                y = h[col][i]; pred = torch.sigmoid(nets[i](h[0][i].float()))[:, 0]
                plin = torch.sigmoid(lin(h[0][i].float()))[:, 0]
                order = pred.argsort(descending=True); n = len(order)
                report[f"{c} {kind} {where}"] = dict(
                    untranslated=plain[where][col - 1][i].mean().item(), accepted=y.mean().item(),
                    corr=np.corrcoef(pred, y)[0, 1], corr_linear=np.corrcoef(plin, y)[0, 1],
                    predicted=pred.mean().item(),
                    by_fifth=[round(y[order[j * n // 5:(j + 1) * n // 5]].mean().item(), 3) for j in range(5)])
    for k, v in report.items():
        print(k, {a: (round(b, 3) if isinstance(b, float) else b) for a, b in v.items()}, flush=True)
    for name in uc.Translator._fields:
        tensors[f"translator_{name}"] = torch.stack([getattr(t, name) for t in exits.translators]).contiguous()
    from safetensors.torch import save_file
    save_file(tensors, output, metadata=dict(format="early-exit-spike", cutoffs=",".join(map(str, cutoffs)),
              num_layers=str(model.config.num_hidden_layers), hidden_size=str(model.config.hidden_size)))
    output.with_suffix(".json").write_text(json.dumps(report, indent=1))
    print("done after", round(time.time() - began), "s")
