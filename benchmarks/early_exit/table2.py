# SPDX-License-Identifier: Apache-2.0
"""table2.py FILES LAYERS [BASE]"""
import json, sys, statistics, math
from collections import defaultdict
L = int(sys.argv[2]); base_name = sys.argv[3] if len(sys.argv) > 3 else '{"k": 0}'
data = defaultdict(lambda: defaultdict(list))
for f in sys.argv[1].split(","):
    for i, line in enumerate(open(f)):
        m = json.loads(line); m["file"] = f; data[m["mode"], m["batch"]][m["config"]].append(m)
BLOCKS = 8; SHARE = 0.93  # of a plain step that layers take
for (mode, batch), by in sorted(data.items()):
    base = by[base_name]; n = len(base)
    def blocks(ms):
        cycles = sorted({(m["file"], m["cycle"]) for m in base}); at = {c: i * BLOCKS // len(cycles) for i, c in enumerate(cycles)}
        out = [[] for _ in range(BLOCKS)]
        for m in ms:
            if (m["file"], m["cycle"]) in at: out[at[m["file"], m["cycle"]]].append(m)
        return out
    bb = blocks(base)
    trimmed = lambda xs: statistics.mean(sorted(xs)[len(xs) // 20: len(xs) - len(xs) // 20])
    print(f"\n## {mode} batch {batch}: {n} rounds of the base, {1e3 * statistics.median(m['seconds'] for m in base):.1f} ms median, {1e3 * trimmed([m['seconds'] for m in base]):.1f} trimmed mean")
    rows = []
    for c, ms in by.items():
        d = json.loads(c)
        rate = lambda xs: (sum(m["tokens"] for m in xs) / len(xs)) / trimmed([m["seconds"] for m in xs])
        tokens = sum(m["tokens"] for m in ms); rounds = len(ms) * batch; tpr = tokens / rounds
        sd = statistics.pstdev([m["tokens"] / batch for m in ms]) / math.sqrt(len(ms))
        cost = trimmed([m["seconds"] for m in ms]) / trimmed([m["seconds"] for m in base])
        med_cost = statistics.median(m["seconds"] for m in ms) / statistics.median(m["seconds"] for m in base)
        per_block = sorted((trimmed([m["seconds"] for m in x]) / trimmed([m["seconds"] for m in y])) for x, y in zip(blocks(ms), bb) if x and y)
        sp = defaultdict(float)
        for m in ms:
            for k, v in m.get("spent", {}).items(): sp[k] += v
        dr = sp["drafts"] / rounds
        ideal = tpr / (1 + dr * d.get("exit_layer", 0) / L)
        acc = (tpr - 1) / dr if dr else float("nan")
        # Counted: layers at the base's time each, the other parts as measured.
        t0 = 1e3 * trimmed([m["seconds"] for m in base]); l = SHARE * t0 / L; per = lambda k: 1e3 * sp[k] / len(ms)
        passes = sp["passes"] / len(ms); E = d.get("exit_layer", 0)
        resumed = d.get("reuse", True)
        pred = (t0 + (passes - (1 if resumed and E else 0)) * E * l + sum(per(k) for k in ("metadata", "probe", "head", "draw", "tail")) + (0.6 if dr else 0)) / t0 if E else 1.0
        parts = {k: round(1e3 * sp[k] / len(ms), 2) for k in ("metadata", "layers", "probe", "head", "draw", "tail") if sp[k]}
        rows.append((tpr / cost, c, acc, dr, tpr, sd, ideal, cost, per_block[0], per_block[-1], med_cost, len(ms), 1e3 * trimmed([m["seconds"] - m.get("draft_seconds", 0) for m in ms]), parts, pred))
    for r in sorted(rows, reverse=True):
        nm = r[1].replace('"', '').replace('threshold', 't').replace('exit_layer', 'E')
        print(f"{r[0]:.3f} [{r[4] / r[9]:.2f} {r[4] / r[8]:.2f}; by medians {r[4] / r[10]:.3f}] acc {r[2]:.3f} drafts {r[3]:.2f} tok/rd {r[4]:.3f}±{r[5]:.3f} ideal {r[6]:.3f} cost {r[7]:.3f} counted {r[14]:.3f} rest {r[12]:.1f}ms n={r[11]} {nm} {r[13]}")
