# SPDX-License-Identifier: Apache-2.0
"""What lm-eval takes with model `utio`, against its own `vllm` model on the same wheel.

Its own model is run twice: in upstream's own way (`bounded_prompt_logprobs=False`), and
unmodified, which on this fork scores in bounded memory and reads the score cache.

    taskset -c 0 .venv/bin/python benchmarks/lm_eval_speed.py --model reference wide

Multiple choice, 4 answers, 16 shots: the tasks of `examples/lm_eval`. Both models are
built with the same options and lm-eval's defaults otherwise, answer the same requests
by turns with an empty prefix cache, and must give the same answers. `own shots`: each
question has shots of its own, lm-eval's default. `same shots`: all have the same, as in
MMLU. `labels`: the same, with the answers " A" to " D", of one token.

Times are CPU time of the process. One thread computes, so on an idle machine that is
the time on the clock, and on a busy one it is the fairer measure.

The bound is a plain prefill of each question's context and first answer, by an engine
that reads its prefix cache: no scoring can do with less.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from processes import random_llama

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "lm_eval"
REFERENCE = ROOT / "examples" / "reference_model" / "model"
sys.path.insert(0, str(EXAMPLE))
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # it is this process's time

CASES = {
    "own shots": "held_out_next_line",
    "same shots": "held_out_next_line_same_shots",
    "labels": "held_out_next_line_same_shots",
}
TOLERANCE = 1e-4
"""Nats a token by which two float32 evaluations may differ, as in the tests."""


def main() -> None:
    args = parse_args()
    report = {"python": platform.python_version(), "machine": platform.processor()}
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            path = REFERENCE
            if name == "wide":
                model = random_llama(128_256, 1024, 2, "float32")
                path = with_tokenizer(model, Path(folder))
            report[name] = measure_model(path, args)
        show(name, report[name])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", default=["reference"],
                        choices=["reference", "wide"])  # fmt: skip
    parser.add_argument("--case", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=32,
                        help="32 is the least on a CPU; a GPU's default is 16")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def with_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a random-weight model in a folder, with the reference tokenizer."""
    for file in [*model.iterdir(), *REFERENCE.glob("tokenizer*")]:
        shutil.copy(file, folder)
    return folder


def measure_model(path: Path, args: argparse.Namespace) -> dict[str, dict]:
    from lm_eval.models.vllm_causallms import VLLM
    from utio_model import UTIO

    options = dict(
        dtype="float32",
        enforce_eager=True,
        block_size=args.block_size,
        max_model_len=1024,
        kv_cache_memory_bytes=2**29,
        batch_size="auto",
    )
    theirs = VLLM(str(path), **options, bounded_prompt_logprobs=False)
    gaining, ours = VLLM(str(path), **options), UTIO(str(path), **options)
    models = theirs, gaining, ours
    return {
        case: measure(*models, build_requests(case, args.questions), args.repeat)
        for case in args.case
    }


def build_requests(case: str, questions: int) -> list:
    """The log-likelihood requests that lm-eval makes of a task."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(EXAMPLE / "tasks"), include_defaults=False)
    task = manager.load([CASES[case]])["tasks"][CASES[case]]
    task.build_all_requests(limit=questions, rank=0, world_size=1)
    requests = task.instances
    if case == "labels":
        for request in requests:
            request.arguments = (request.args[0], f" {'ABCD'[request.idx]}")
    return requests


def measure(theirs, gaining, ours, requests: list, repeat: int) -> dict:
    """Times the paths by turns, each once before that to warm up."""
    paths = {
        "lm-eval's vllm": lambda: theirs.loglikelihood(requests, disable_tqdm=True),
        "the same on this fork": lambda: gaining.loglikelihood(
            requests, disable_tqdm=True
        ),
        "utio": lambda: ours.loglikelihood(requests, disable_tqdm=True),
        "bound": lambda: prefill(ours, requests),
    }
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(repeat + 1):
        answers = {}
        for name, run in paths.items():
            for model in (theirs, gaining, ours):
                assert model.model.reset_prefix_cache()
            begin = time.process_time()
            answers[name] = run()
            seconds[name].append(time.process_time() - begin)
        difference = compare(ours, requests, answers)
    seconds = {name: times[1:] for name, times in seconds.items()}
    first = seconds["lm-eval's vllm"]
    tokens = [sum(map(len, ours._encode_pair(*r.args))) for r in requests]
    return {
        "requests": len(requests),
        "tokens": sum(tokens),
        "seconds": seconds,
        "speedup": {
            name: [x / y for x, y in zip(first, times)]
            for name, times in seconds.items()
        },
        "greatest_difference_nats": difference,
    }


def prefill(model, requests: list) -> None:
    from vllm import SamplingParams, TokensPrompt

    contexts = {r.args[0]: r.args for r in reversed(requests)}
    prompts = [sum(model._encode_pair(*pair), []) for pair in contexts.values()]
    model.model.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in sorted(prompts)],
        SamplingParams(max_tokens=1, detokenize=False),
        use_tqdm=False,
    )


def compare(model, requests: list, answers: dict) -> float:
    """The greatest difference of two sums, once all answers are found the same."""
    greatest = 0.0
    for path in ("the same on this fork", "utio"):
        pairs = zip(requests, answers["lm-eval's vllm"], answers[path], strict=True)
        for request, (expected, is_greedy), (found, ours_is_greedy) in pairs:
            num_tokens = len(model._encode_pair(*request.args)[1])
            assert abs(found - expected) <= num_tokens * TOLERANCE, request
            assert bool(is_greedy) == ours_is_greedy, request
            greatest = max(greatest, abs(found - expected))
    return greatest


def show(name: str, cases: dict[str, dict]) -> None:
    """Prints a row a path: medians, with half the interquartile range as spread."""
    print(f"\n{name} model: 4 answers, 16 shots")
    print("| case | path | CPU seconds | spread | speedup |")
    print("| --- | --- | ---: | ---: | ---: |")
    for case, result in cases.items():
        for path, times in result["seconds"].items():
            median = statistics.median(times)
            spread = iqr(times) / 2 / median
            ratios = result["speedup"][path]
            ratio = f"{statistics.median(ratios):.2f} ±{iqr(ratios) / 2:.2f}"
            print(f"| {case} | {path} | {median:.2f} | ±{spread:.0%} | {ratio} |")
        print(
            f"{result['requests']} requests of {result['tokens']} tokens; the same "
            f"answers, sums within {result['greatest_difference_nats']:.1e} nats"
        )


def iqr(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


if __name__ == "__main__":
    main()
