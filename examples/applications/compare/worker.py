# SPDX-License-Identifier: Apache-2.0
"""The process of one engine: scores what is missing of one model, and ends.

It reads a job as JSON from its standard input and reports on a pipe, a JSON object a
line. Its memory, on the device too, is free when it has ended.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compare.engine import new_engine, with_cache
from compare.files import write_json
from compare.plan import Model, Plan
from compare.reference import (
    TOKENS_PER_STEP,
    Reference,
    Refused,
    check_same_vllm,
    check_same_vocabulary,
    compare_with,
    describe,
    make_reference,
)
from compare.store import Scores, Store
from compare.texts import ByteCounter, open_texts, stream_windows
from compare.windows import Window, calls, first_positions

if TYPE_CHECKING:
    from vllm import LLM

PR_SET_PDEATHSIG = 1  # of prctl(2)
WARM_UP = 16  # positions


class Job(NamedTuple):
    plan: Plan
    store: Store
    model: Model | None  # None: the reference
    backwards: bool  # submit windows in the other order
    tell: Callable[[dict[str, Any]], None]


def main(arguments: argparse.Namespace) -> None:
    end_with(arguments.parent)
    pipe = os.fdopen(arguments.pipe, "w")

    def tell(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=pipe, flush=True)

    given = json.load(sys.stdin)
    model = Model(**given["model"]) if given["model"] else None
    job = Job(
        Plan(**given["plan"]), Store(Path(given["folder"])), model, given["backwards"],
        tell,
    )  # fmt: skip
    # The scheduler in this process: batches, and so roundings, are the same each time.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        score_model(job) if model else score_reference(job)
    except (Refused, SystemExit) as error:
        tell({"error": str(error).removeprefix("error: ")})
        sys.exit(1)


def end_with(parent: int) -> None:
    """Has the kernel kill this process when the one that started it dies, so that no
    engine is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one has died")


def start(job: Job, model: Model, tokens_per_step: int) -> "LLM":
    plan = job.plan
    options = {"max_num_batched_tokens": tokens_per_step} | model.options
    if job.backwards:
        options["max_num_batched_tokens"] = max(tokens_per_step // 2, 1)
    if model.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = model.tensor_parallel_size
    llm = new_engine(
        "context_length",
        model=model.folder,
        dtype=model.dtype,
        quantization=model.quantization,
        max_model_len=plan.context_length,
        max_logprobs=plan.top_k + plan.tail_samples + 1,
        enable_prefix_caching=False,  # windows start at different tokens
        **with_cache(options),
    )
    job.tell({"started": model.label})
    return llm


def windows_of_text(job: Job, llm: "LLM") -> Iterator[Window]:
    plan = job.plan
    arguments = argparse.Namespace(**plan.texts.model_dump())
    texts = open_texts(arguments)()
    yield from stream_windows(
        llm.get_tokenizer(), texts, plan.context_length, plan.step,
        plan.texts.limit_tokens,
    )  # fmt: skip


def read_through(job: Job, llm: "LLM") -> dict[str, Any]:
    """Counts what is to be scored, once, without keeping it."""
    counter = ByteCounter(llm.get_tokenizer())
    totals = {"positions": 0, "windows": 0, "prompt_tokens": 0, "bytes": 0, "calls": 0}
    for call in calls(windows_of_text(job, llm), job.plan.tokens_per_call):
        totals["calls"] += 1
        totals["windows"] += len(call)
        totals["positions"] += sum(window.scored for window in call)
        totals["prompt_tokens"] += sum(len(window.token_ids) for window in call)
        totals["bytes"] += counter.add(call)
    totals["bytes"] += counter.rest()
    if not totals["positions"]:
        raise Refused("texts: no token with another before it, nothing to score")
    return totals


def score_reference(job: Job) -> None:
    """Writes the reference, call by call; goes on where it was left."""
    plan, store = job.plan, job.store
    options = plan.reference.options
    open_texts(argparse.Namespace(**plan.texts.model_dump()))  # or refuses, at once
    llm = start(
        job, plan.reference, options.get("max_num_batched_tokens", TOKENS_PER_STEP)
    )
    described = describe(llm)
    if plan.top_k > int(described["vocabulary"]):
        raise Refused(
            f"top_k is {plan.top_k}, the vocabulary is {described['vocabulary']}"
        )
    if store.text is None:
        write_json(store.text_path, read_through(job, llm))
    job.tell({"total": store.text["positions"]})
    scores, warm = store.reference, False
    if scores.count():
        check_same_vllm(described, scores.described)
    scores.described = described
    every = calls(windows_of_text(job, llm), plan.tokens_per_call)
    for number, call in enumerate(every):
        if scores.has(number):
            check_same_windows(scores, number, call)
            continue
        if not warm:
            few = first_positions(call, WARM_UP)
            make_reference(llm, few, plan.top_k, plan.tail_samples)
            warm = True
        begin = time.perf_counter()
        part = make_reference(llm, call, plan.top_k, plan.tail_samples, number)
        seconds = time.perf_counter() - begin
        scores.save_reference(number, part, seconds)
        job.tell({"scored": len(part.next_logprobs), "seconds": seconds})


def check_same_windows(scores: Scores, number: int, call: list[Window]) -> None:
    if scores.load_reference(number).windows != call:
        raise Refused("texts: not those that were scored before; --restart starts over")


def score_model(job: Job) -> None:
    """Scores what the reference names, file by file; goes on where it was left."""
    reference, total = job.store.reference, job.store.text["calls"]
    scores = job.store.scores(job.model.label)
    missing = [number for number in range(total) if not scores.has(number)]
    described = reference.described
    llm = start(job, job.model, int(described["max_num_batched_tokens"]))
    ours = describe(llm)
    check_same_vocabulary(ours, described, job.model.label)
    check_same_vllm(ours, described)
    scores.described = ours
    for number in missing[:1]:
        compare_with(llm, first_of(reference.load_reference(number)))
    for number in missing:
        part = reference.load_reference(number)
        begin = time.perf_counter()
        result = compare_with(llm, part, job.backwards)
        seconds = time.perf_counter() - begin
        scores.save_positions(number, part, result, seconds)
        job.tell({"scored": len(result.kl), "seconds": seconds})


def first_of(part: Reference) -> Reference:
    """The first positions of a reference, to warm up with."""
    few = first_positions(part.windows, WARM_UP)
    count = sum(window.scored for window in few)
    arrays = [array[:count] for array in part[1:-1]]
    return Reference(few, *arrays, part.metadata)
