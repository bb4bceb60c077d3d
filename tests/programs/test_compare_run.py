# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/compare` from end to end: one command, a kill in the middle,
the same command again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import runners
import yaml
from compare_models import save_noisy
from tiny_models import make_tokenizer, save_model
from waiting import until

PROGRAM = Path(__file__).parents[2] / "examples" / "applications" / "compare"
TEXT = "".join(path.read_text() for path in sorted(PROGRAM.glob("*.py")))[:24_000]
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20}
TIMES = ("seconds", "tokens_per_second")
PATIENCE = 600  # seconds that an engine on a busy machine may take to start


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """A reference and a noisy one; many small calls, so that a kill finds some done and
    some not."""
    folder = tmp_path_factory.mktemp("plan")
    source = save_model("llama", folder / "source")
    noisy = save_noisy(source, folder / "noisy")
    text = folder / "text.txt"
    text.write_text(TEXT)
    content = {
        "reference": {"path": str(source), "name": "source", "dtype": "float32"},
        "candidates": [{"path": str(noisy), "dtype": "float32"}],
        "defaults": {"options": OPTIONS},
        "texts": {"text": [str(text)]},
        "context_length": 96,
        "call_tokens": 192,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    assert len(make_tokenizer()(TEXT)["input_ids"]) > 5000
    return path


def start(runner: str, plan: Path, output: Path, *options) -> subprocess.Popen:
    command = [sys.executable, str(PROGRAM), "run", str(plan), "--output", str(output)]
    return subprocess.Popen(
        [*command, *options], env=runners.environment(runner), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def complete(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=4 * PATIENCE)
    assert process.returncode == 0, out + error
    return out


def kill_when(process: subprocess.Popen, there: Path) -> None:
    """Kills the program, and so its engine, when a file is there."""

    def is_there() -> bool:
        assert there.exists() or process.poll() is None
        return there.exists()

    until(is_there, PATIENCE)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for_end(output: Path) -> None:
    """Until no process of a run holds the folder's lock."""
    import fcntl

    with (output / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def scored(output: Path) -> dict[str, tuple[int, bytes]]:
    """When each file of scores was written, and what is in it."""
    files = output.glob("**/[0-9]*.safetensors")
    return {
        str(path.relative_to(output)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def whole(runner, plan, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed run: its folder and what it printed."""
    if runner == "v2":
        pytest.skip("it is about files and processes; the figures are tested on V2 too")
    output = tmp_path_factory.mktemp("whole")
    return output, complete(start(runner, plan, output))


def test_after_a_kill_nothing_is_scored_twice_and_the_result_is_the_same(
    runner, plan, whole, tmp_path
):
    output = tmp_path / "killed"
    for there in ("reference/00005.safetensors", "models/noisy/00005.safetensors"):
        kill_when(start(runner, plan, output, "--no-noise-floor"), output / there)
        wait_for_end(output)
        before = scored(output)
        assert there in before
    assert len(before) < len(scored(whole[0]))
    assert not (output / "report.json").exists()
    complete(start(runner, plan, output, "--no-noise-floor"))
    after = scored(output)
    assert before.items() <= after.items()  # the same bytes, written at the same time
    killed, undisturbed = (
        json.loads((folder / "report.json").read_text()) for folder in (output, whole[0])
    )
    for report in (killed, undisturbed):
        del report["plan"]["noise_floor"], report["noise_floor"]
    assert without_times(killed) == without_times(undisturbed)
    lines, expected = (
        (folder / "results.jsonl").read_bytes().splitlines() for folder in (output, whole[0])
    )
    assert lines == expected[1:]  # byte for byte; the first is the noise floor's
    assert [json.loads(line) for line in lines] == without_times(killed["models"])

    files = {path: path.read_bytes() for path in output.glob("*.*")}
    begin = time.monotonic()
    complete(start(runner, plan, output, "--no-noise-floor"))
    assert time.monotonic() - begin < PATIENCE
    assert {path: path.read_bytes() for path in output.glob("*.*")} == files
    assert scored(output) == after


def test_the_noise_floor_is_small(whole):
    output, printed = whole
    report = json.loads((output / "report.json").read_text())
    [noisy] = (model["figures"] for model in report["models"])
    floor = report["noise_floor"]["figures"]
    assert report["noise_floor"]["dtype"] == "bfloat16"
    kl = [figures["kl"]["estimate"]["mean"] for figures in (floor, noisy)]
    assert 0 < 3 * kl[0] < kl[1]
    assert report["failed"] == [] and noisy["non_finite"] == 0
    reference = report["reference"]
    assert reference["bytes"] < reference["bytes_of_all_logits_in_float16"] / 2
    sizes = [model["size_on_disk"] for model in [reference, *report["models"]]]
    assert sizes == 2 * [(Path(reference["path"]) / "model.safetensors").stat().st_size]
    assert f"{noisy['perplexity']['value']:.4f}" in printed


def test_page_and_plots(whole):
    output, _ = whole
    page = (output / "report.md").read_text()
    for name in ("noise floor", "noisy"):
        assert page.count(f"| {name} |") > 10
    for name in ("kl_against_size", "probability_change", "by_confidence"):
        assert f"![{name}]({name}.png)" in page
        assert (output / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "</svg>" in (output / f"{name}.svg").read_text()


def test_the_bench_compares_three_ways_that_agree(runner, whole):
    command = [PROGRAM, "bench", whole[0]]
    command += ["--positions", "40", "--full-positions", "40", "--repeat", "1"]
    done = forks.run(command, runners.environment(runner))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {}
    for name in ("named tokens", "Transformers", "full vocabulary", "all logits, float16"):
        line = next(x for x in done.stdout.splitlines() if x.startswith(f" {name} "))
        rows[name] = line.removeprefix(f" {name} ").split()
    named, transformers, full = (float(rows[name][1]) for name in [*rows][:3])
    assert full == pytest.approx(transformers, rel=0.01)
    assert named == pytest.approx(full, rel=0.3)  # the draws' error
    whole_file = int(rows["all logits, float16"][0].replace(",", ""))
    assert whole_file == 40 * 1000 * 2 + 128  # the header of NumPy's format


def test_models_that_fail_are_reported_and_the_others_are_not_held_up(
    runner, plan, whole, tmp_path
):
    """In the folder of the whole run, of which nothing is scored again."""
    content = yaml.safe_load(plan.read_text())
    other = save_model("qwen2", tmp_path / "qwen2")
    damaged = save_model("llama", tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    paths = [other, damaged.parent]
    content["candidates"][:0] = [{"path": str(path)} for path in paths]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    before = scored(whole[0])
    process = start(runner, path, whole[0])
    _, error = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 1 and error.endswith("error: qwen2, damaged failed\n")
    assert scored(whole[0]) == before
    report = json.loads((whole[0] / "report.json").read_text())
    assert [model["model"] for model in report["models"]] == ["noisy"]
    for row, said in zip(report["failed"], ("the same vocabulary", "deserializing header")):
        assert said in row["error"]
    page = (whole[0] / "report.md").read_text()
    assert "qwen2 failed: " in page and "damaged failed: " in page
    assert os.listdir(whole[0] / "models" / "qwen2") == ["model.json"]
