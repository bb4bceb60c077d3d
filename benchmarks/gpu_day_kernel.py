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
CACHES = 2**28
"""Bytes that no GPU's caches hold."""
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
    # Not in float32: a log-probability of -256 has steps of 3e-5.
    found = values.double() - maximum.double() - log_total.double()
    entropies = torch.special.entr(logp.exp()).sum(1, keepdim=True)
    off = torch.stack((
        (found - logp.gather(1, ids)).abs().max(),
        (entropy.double() - entropies).abs().max(),
    )).max().item()  # fmt: skip
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


def milliseconds(call, inputs: list, device: str) -> float:
    """Median time of a call on one of the inputs, by turns; on a CPU of one call.

    On a GPU calls are replayed from a CUDA graph, so that no launch from Python is in
    it. Inputs should together be larger than the GPU's caches.
    """
    if device == "cuda":
        import triton

        def all_inputs():
            for one in inputs:
                call(*one)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            total = triton.testing.do_bench_cudagraph(all_inputs, return_mode="median")
        return total / len(inputs)
    begin = time.perf_counter()
    call(*inputs[0])
    return (time.perf_counter() - begin) * 1e3


def copy_bandwidth(device: str, size: int) -> float:
    """GB/s read and written when a tensor of `size` bytes is copied."""
    source = torch.empty(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    if device != "cuda":
        return 2 * size / milliseconds(target.copy_, [(source,)], device) / 1e6
    import triton

    # Not from a graph, where the copy is another kind of operation and slower.
    milli = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * size / milli / 1e6


def copies(inputs: tuple, device: str) -> list[tuple]:
    """The inputs, so often that they are larger than a GPU's caches."""
    size = sum(tensor.nbytes for tensor in inputs)
    count = -(-CACHES // size) if device == "cuda" else 1
    return [tuple(tensor.clone() for tensor in inputs) for _ in range(count)]


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
                kernel_ms = milliseconds(read_logits, copies((logits, values), device), device)
                torch_ms = milliseconds(with_torch, copies((logits, ids), device), device)
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
    if device == "cuda":
        tables.append(beside_head(read_logits, max(vocabularies)))
    return {"tables": tables, "problems": problems}


def beside_head(read_logits, vocabulary: int, hidden: int = 4096) -> dict:
    """The product of the LM head, which comes before the read, by rows at once."""
    states = torch.randn(8192, hidden, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)
    table = []
    for rows in (64, 128, 165, 256, 331, 512, 1024, 2048):
        head = milliseconds(lambda h: h @ weights.T, [(states[:rows],)], "cuda")
        logits = states[:rows] @ weights.T
        values = logits[:, :1].float().contiguous()
        read = milliseconds(read_logits, copies((logits, values), "cuda"), "cuda")
        rate = 2 * rows * vocabulary * hidden / head / 1e9
        table.append([rows, f"{head:.3f}", f"{rate:.0f}", f"{head / rows * 1e3:.2f}",
                      f"{read:.3f}", f"{read / head:.2f}"])  # fmt: skip
    columns = ["rows", "head, ms", "TFLOP/s", "head, µs a row", "read, ms", "read / head"]
    title = f"The head's product, {vocabulary:,} × {hidden:,} in bfloat16, and the read after it"
    return {"title": title, "columns": columns, "rows": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--kernel", type=Path, help="the file with the kernel")
    # As many rows of the larger vocabulary as 96 MiB of float32 are.
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
