# SPDX-License-Identifier: Apache-2.0
"""The kernel that reads logits once: correct against float64, time, bandwidth.

    python benchmarks/gpu_day_kernel.py

Needs torch and triton, and neither vLLM nor its wheel: the kernel's file is taken out
of the patch that brings it, unless `--kernel` names one. Without a GPU,
`TRITON_INTERPRET=1` runs it in Triton's interpreter, which says nothing of its speed.

Bandwidth is that of one read of the logits, which is what the kernel needs; *of a copy*
compares it with what copying a large tensor reads and writes on the same device.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PATCH = "patches/scoring/read-logits-once-when-scoring-named-tokens-on-a-gpu.patch"
FILE = "vllm/v1/worker/gpu_logits_reader.py"
LIMIT = 2e-5
"""Nats that logarithms of totals and entropies, both below 16, may be off by: sums of
some twenty blocks, each of some ten float32 additions in a row."""
SCALES = (1e-3, 1.0, 30.0)
"""Of the logits: flat, usual and peaked distributions."""


def kernel_file(folder: Path) -> Path:
    """The kernel's file, out of the patch, in `folder`.

    Raises:
        ValueError: the patch does not add it.
    """
    _, _, rest = (ROOT / PATCH).read_text().partition(f"\n+++ b/{FILE}\n")
    rest = rest.partition("\ndiff --git ")[0]
    lines = [line[1:] for line in rest.splitlines() if line.startswith("+")]
    if not lines:
        raise ValueError(f"{PATCH} does not add {FILE}")
    path = folder / Path(FILE).name
    path.write_text("\n".join(lines) + "\n")
    return path


def load(path: Path):
    """The module of a file."""
    spec = importlib.util.spec_from_file_location("gpu_logits_reader", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def error(read_logits, logits: torch.Tensor, ids: torch.Tensor) -> tuple[float, int]:
    """Greatest error in nats against float64, and how many counts are wrong."""
    values = logits.gather(1, ids).float()
    maximum, log_total, entropy, greater = read_logits(logits, values)
    exact = logits.double()
    logp = exact.log_softmax(1)
    found = (values - maximum - log_total).double()
    entropies = torch.special.entr(logp.exp()).sum(1, keepdim=True)
    off = max(
        (found - logp.gather(1, ids)).abs().max().item(),
        (entropy.double() - entropies).abs().max().item(),
    )
    # One candidate at a time: all at once would be rows × candidates × vocabulary.
    wrong = sum(
        int(((exact > value[:, None]).sum(1) != count).sum())
        for value, count in zip(values.double().unbind(1), greater.unbind(1))
    )
    return off, wrong


def with_torch(logits: torch.Tensor, ids: torch.Tensor):
    """What PyTorch alone does for the same numbers."""
    logp = logits.float().log_softmax(1)
    values = logp.gather(1, ids)
    greater = torch.stack([(logp > v[:, None]).sum(1) for v in values.unbind(1)], 1)
    return values, greater, -(logp.exp() * logp).sum(1)


def milliseconds(call, device: str) -> float:
    """Median time of a call; on a CPU of one."""
    if device == "cuda":
        import triton

        return triton.testing.do_bench(call, return_mode="median")
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def copy_bandwidth(device: str, size: int) -> float:
    """GB/s read and written when a tensor of `size` bytes is copied."""
    source = torch.empty(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device) / 1e6


def run(device: str, kernel: Path, rows: int, vocabularies: list[int]) -> dict:
    """Each case's error, time and bandwidth, as a part of the report."""
    read_logits = load(kernel).read_logits
    torch.manual_seed(0)
    copied = copy_bandwidth(device, 2**30 if device == "cuda" else 2**26)
    table, problems = [], []
    for vocabulary in vocabularies:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            scale = torch.tensor(SCALES, device=device).repeat(-(-rows // 3))[:rows]
            logits = torch.randn(rows, vocabulary, device=device) * scale[:, None]
            logits = logits.to(dtype)
            for count in (1, 8, 64):
                ids = torch.randint(vocabulary, (rows, count), device=device)
                off, wrong = error(read_logits, logits, ids)
                if not off <= LIMIT or wrong:
                    problems.append(
                        f"{vocabulary}, {name}, {count}: off by {off:.1e} nats, "
                        f"{wrong} counts wrong"
                    )
                values = logits.gather(1, ids).float()
                kernel_ms = milliseconds(lambda: read_logits(logits, values), device)
                torch_ms = milliseconds(lambda: with_torch(logits, ids), device)
                rate = logits.nbytes / kernel_ms / 1e6
                table.append([
                    vocabulary, name, count, f"{off:.1e}", wrong, f"{kernel_ms:.3f}",
                    f"{torch_ms:.3f}", f"{torch_ms / kernel_ms:.1f}", f"{rate:.0f}",
                    f"{rate / copied:.2f}",
                ])  # fmt: skip
    columns = [
        "vocabulary", "type", "candidates", "error, nats", "wrong ranks", "kernel, ms",
        "torch, ms", "torch / kernel", "GB/s", "of a copy",
    ]  # fmt: skip
    title = f"One read of {rows} rows of logits; a copy moves {copied:.0f} GB/s"
    tables = [{"title": title, "columns": columns, "rows": table}]
    return {"tables": tables, "problems": problems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--kernel", type=Path, help="the file with the kernel")
    # As many float32 rows of the larger vocabulary as one batch of scoring has.
    parser.add_argument("--rows", type=int, default=165 if has_gpu else 4)
    parser.add_argument("--vocabularies", type=int, nargs="+",
                        default=[32_000, 128_256, 151_936] if has_gpu else [17, 9000])  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kernel = args.kernel or kernel_file(Path(folder))
        result = run(args.device, kernel, args.rows, args.vocabularies)
    for table in result["tables"]:
        print(table["title"], " | ".join(table["columns"]), sep="\n")
        for row in table["rows"]:
            print(" | ".join(map(str, row)))
    if args.json:
        args.json.write_text(json.dumps(result))
    if result["problems"]:
        sys.exit("error: " + "\n".join(result["problems"]))


if __name__ == "__main__":
    main()
