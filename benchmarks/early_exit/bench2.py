# SPDX-License-Identifier: Apache-2.0
"""bench2.py OUT.jsonl MODEL CALIBRATION BATCH MODE SECONDS CONFIGS.json [SEED]

Configurations take turns from round to round, on the same live requests, so that all see
the same texts, contexts and state of the machine. A round of a configuration is what its
drafting takes, at the end of one engine step, and all else of the step after, which
verifies; its tokens are that step's. Engines of other kinds (plain, n-gram) step by turns
with them on requests of their own with the same prompts."""
import gc, random, torch
from collections import defaultdict
from spike import *
from vllm import SamplingParams
from vllm.v1.engine import core
from vllm.model_executor.layers import utils
core.cleanup_dist_env_and_memory = lambda *a, **k: None
from vllm.v1.spec_decode.early_exit import SPENT
LONGEST = 320  # tokens a request before new prompts are taken

out, model, cal, batch, mode, seconds, configs = sys.argv[1:8]
seed = int(sys.argv[8]) if len(sys.argv) > 8 else 1
batch, seconds = int(batch), float(seconds)
configs = json.loads(configs) if configs.startswith("[") else json.loads(Path(configs).read_text())
common = dict(max_num_seqs=16, max_model_len=512, kv_cache_memory_bytes=2**28)
others = {c.get("engine") for c in configs} - {None}
engines = {}
if "plain" in others: engines["plain"] = start(model, "bfloat16", spec=None, **common)
engines["spec"] = start(model, "bfloat16", calibration=cal, **common)
if "ngram" in others: engines["ngram"] = start(model, "bfloat16", spec=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2), **common)
tok = engines["spec"].get_tokenizer()
supply = iter(prompts(tok, 600, 64, held_out=True, seed=seed))
sp = SamplingParams(temperature=0.0 if mode == "greedy" else 1.0, max_tokens=440, ignore_eos=True)
serial = 0


class Live:
    def __init__(self, llm):
        self.engine, self.count = llm.llm_engine, {}
    def fill(self, ps):
        global serial
        self.engine.abort_request(list(self.count)); self.count = {}
        while self.engine.has_unfinished_requests(): self.engine.step()
        for p in ps:
            serial += 1; self.engine.add_request(f"r{serial}", dict(prompt_token_ids=p), sp)
        while len(self.count) < len(ps): self.step()
    def step(self):
        begin = time.perf_counter()
        outs = self.engine.step()
        took = time.perf_counter() - begin
        n = 0
        for o in outs:
            now = len(o.outputs[0].token_ids); n += now - self.count.get(o.request_id, 0); self.count[o.request_id] = now
            assert not o.finished
        return took, n


live = {k: Live(v) for k, v in engines.items()}
drafter = runner(engines["spec"]).drafter
propose = drafter.propose
state = dict(took=0.0, pad=0)
def timed(*a, **k):
    utils.PAD_ROWS = state["pad"]
    begin = time.perf_counter(); v = propose(*a, **k); state["took"] = time.perf_counter() - begin
    return v
drafter.propose = timed
mine = [c for c in configs if "engine" not in c]
rng = random.Random(seed); gc.disable()
begin = time.time(); cycles = 0; f = open(out, "a"); groups = 0
name = lambda c: json.dumps(c)
while time.time() - begin < seconds:
    if cycles == 0 or any(max(l.count.values()) > LONGEST for l in live.values()):
        ps = [next(supply) for _ in range(batch)]; groups += 1
        utils.PAD_ROWS = state["pad"] = 0; setup(engines["spec"], k=0)
        for l in live.values(): l.fill(ps); l.step()
        pending, pad = None, 0
        gc.collect()
    order = configs[:]; rng.shuffle(order)
    spec_order = iter([c for c in order if "engine" not in c])
    for c in order:
        if "engine" in c:
            utils.PAD_ROWS = 0
            took, n = live[c["engine"]].step()
            f.write(json.dumps(dict(mode=mode, batch=batch, cycle=cycles, config=name(c), seconds=took, tokens=n)) + "\n")
            continue
        # verifies the pending configuration's drafts, drafts for this one
        utils.PAD_ROWS = pad
        kw = dict(c); new_pad = kw.pop("pad", 0); setup(engines["spec"], **kw); state["pad"] = new_pad
        before = dict(SPENT); state["took"] = 0.0
        took, n = live["spec"].step()
        if pending is not None:
            p, drafting, spent = pending
            f.write(json.dumps(dict(mode=mode, batch=batch, cycle=cycles, config=name(p), seconds=drafting + took - state["took"], draft_seconds=drafting, tokens=n, spent=spent)) + "\n")
        pending, pad = (c, state["took"], {k: v - before.get(k, 0) for k, v in SPENT.items() if v != before.get(k, 0)}), new_pad
    cycles += 1
f.close()
print(mode, batch, cycles, "cycles,", groups, "groups of prompts", "mismatches", SPENT["mismatch"], "resumed", SPENT["resumed"], time.ctime())
