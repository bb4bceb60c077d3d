# SPDX-License-Identifier: Apache-2.0
"""How far scores are from Hugging Face's in float32, in each way of running.

    .venv/bin/python benchmarks/equality_table.py

{V1, V2} x {tensor parallel 1, 2} x {float32, bfloat16} x {whole, chunked prefill} x
{prefix cache read, not read} x {never, preempted}: the greatest difference of any
log-probability in each cell, and the mean one. A second table has, for each row, the
worst cell of named tokens at temperature 1, of those at other temperatures, of the most
probable tokens with the mass of all others, and of prompts that are scored a second time,
of which the score cache knows the first blocks. The model is the reference model, whose
weights are exact in both types; its text is the README, as prompts that share a prefix.
In float32 the differences are rounding, at most `FLOAT32` nats. In bfloat16 they are the
type's own: the same model in bfloat16 in Hugging Face, last column, is as far off. A cell
may be off by at most `BFLOAT16` times as much, the greatest and on average.

`preempted` cells also generate, in a cache too small for all; every such cell has seen
preemptions, and in chunked prefill some in the middle of a prompt. `never` cells have
seen none. `cached` cells have read the cache for every prompt while nothing was
preempted; `uncached` cells have read nothing.
"""

import argparse
import os
import sys

import numpy as np
import processes
from processes import Worker

MODEL = processes.ROOT / "examples" / "reference_model" / "model"
TEXT = processes.ROOT / "README.md"
BLOCK = 32
SHARED = 2 * BLOCK + 5
SCORED, CANDIDATES = 112, 4
TEMPERATURES = 1.0, 1.0, 0.5, 2.0
"""Of each prompt."""
PROMPTS = len(TEMPERATURES)
TOP_K = 8
GENERATED = 70
STEPS = {"whole": (1024, 14), "chunked": (40, 11)}
"""Tokens a step, and blocks of the cache, one of which vLLM keeps for itself. A prompt
takes six blocks and grows to eight: whole ones are preempted as they grow; of chunked
ones, the second runs out of blocks in the middle of its prompt."""
FLOAT32 = 1e-4
"""In nats. See `tests/scoring.py`."""
BFLOAT16 = {"greatest": 2.0, "mean": 1.25}
"""Of Hugging Face's own in bfloat16."""


class Engine:
    """In the worker."""

    def start(self, dtype: str, tensor_parallel: int, step: int, blocks: int) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(MODEL),
            dtype=dtype,
            tensor_parallel_size=tensor_parallel,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=step,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            scheduler_reserve_full_isl=False,  # else no preemption in mid-prompt
            kv_cache_memory_bytes=2**26,
            disable_log_stats=False,
        )
        self.preempted_in_prompt = 0
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def watch(request, *args, **kwargs):
            if request.num_computed_tokens < request.num_prompt_tokens:
                self.preempted_in_prompt += 1
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = watch

    def preemptions(self) -> tuple[int, int]:
        """All of them, and those in the middle of a prompt."""
        metrics = {m.name: m for m in self.llm.get_metrics()}
        return metrics["vllm:num_preemptions"].value, self.preempted_in_prompt

    def score(self, prompts: list, targets: list, cached: bool, preempt: bool) -> dict:
        """Scores the rows of one cell.

        Returns:
            Log-probabilities `[prompts, rows, candidates + TOP_K + 1]`: of the named
            tokens, the most probable and all others. Cached tokens of each prompt, and
            the preemptions there were, in all and in mid-prompt.
        """
        from vllm import SamplingParams, TokensPrompt

        assert self.llm.reset_prefix_cache()
        shared = prompts[0][:SHARED]
        params = SamplingParams(
            max_tokens=GENERATED if preempt else 0,
            temperature=0.0,
            ignore_eos=True,
            skip_reading_prefix_cache=not cached,
        )
        requests = [
            TokensPrompt(
                prompt_token_ids=ids,
                target_token_ids=rows,
                target_temperature=temperature,
                target_top_k=TOP_K,
            )
            for ids, rows, temperature in zip(prompts, targets, TEMPERATURES)
        ]
        first = TokensPrompt(prompt_token_ids=shared, target_token_ids=shared[-1:])
        self.llm.generate([first], SamplingParams(max_tokens=0), use_tqdm=False)
        before = self.preemptions()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        after = self.preemptions()
        return {
            "logprobs": np.array([
                np.concatenate(
                    [x.logprobs, x.top_logprobs, x.tail_logprob[:, None]], axis=1
                )
                for x in (output.target_logprobs for output in outputs)
            ]),
            "cached": [o.num_cached_tokens for o in outputs],
            "preemptions": [b - a for a, b in zip(before, after)],
        }

    def score_again(self, prompts: list) -> dict:
        """Scores each prompt's own tokens twice.

        Returns:
            The second time: log-probabilities of the last rows, `[prompts, SCORED]`, and
            cached tokens of each prompt.
        """
        from vllm import SamplingParams, TokensPrompt

        assert self.llm.reset_prefix_cache()
        logprobs, cached = [], []
        for ids in prompts:
            request = TokensPrompt(prompt_token_ids=ids, target_token_ids=ids[1:])
            for _ in range(2):
                [output] = self.llm.generate(
                    [request], SamplingParams(max_tokens=0), use_tqdm=False
                )
            logprobs.append(output.target_logprobs.logprobs[-SCORED:, 0])
            cached.append(output.num_cached_tokens)
        return {"again": np.array(logprobs), "known": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runner", nargs="+", default=["v1", "v2"])
    parser.add_argument("--tensor-parallel", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    prompts, targets = make_requests()
    truth = {d: hugging_face(prompts, targets, d) for d in ("float32", "bfloat16")}
    of_type = {d: differences(x, truth["float32"], x[:, :, 0]) for d, x in truth.items()}
    of_type["float32"] = None
    columns = [
        f"{step}, {'cached' if cached else 'uncached'}{', preempted' if preempt else ''}"
        for step in STEPS
        for cached in (True, False)
        for preempt in (False, True)
    ]
    rows, kinds, results, wrong = [], [], [], []
    for dtype in args.dtype:
        for runner in args.runner:
            for tensor_parallel in args.tensor_parallel:
                row = [f"{dtype}, {runner.upper()}, TP {tensor_parallel}"]
                offs = []
                for cell in measure(runner, dtype, tensor_parallel, prompts, targets):
                    again = cell.pop("again", None)
                    offs.append(
                        differences(cell.pop("logprobs"), truth["float32"], again)
                    )
                    row.append(show(offs[-1]["named"]))
                    results.append(cell | {"dtype": dtype, "runner": runner,
                                           "tensor_parallel": tensor_parallel,
                                           "difference": offs[-1]})  # fmt: skip
                    wrong += check(results[-1], of_type[dtype])
                kinds.append(row[:1])
                for kind in offs[-1]:
                    worst = max(
                        (off[kind] for off in offs if kind in off),
                        key=lambda x: x["greatest"],
                    )
                    kinds[-1].append(show(worst))
                    if of_type[dtype]:
                        kinds[-1][-1] += f" ({show(of_type[dtype][kind])})"
                row.append(show(of_type[dtype]["named"]) if of_type[dtype] else "")
                print(*row, *kinds[-1], file=sys.stderr, flush=True)
                rows.append(row)
    processes.show(
        "equality_of_kinds",
        "The same, of the cell with the greatest: named tokens, at temperatures "
        f"{TEMPERATURES[2:]}, the {TOP_K} most probable and all others, and own tokens "
        "from the score cache (in brackets Hugging Face in this type)",
        ["", "named", "temperatures", "top", "score-cached"],
        kinds,
    )
    processes.show(
        "equality",
        f"Greatest and mean |Δ| of 2 × {SCORED} × {CANDIDATES} log-probabilities "
        "from Hugging Face in float32, nats",
        ["", *columns, "Hugging Face in this type"],
        rows,
        cells=results,
        tolerances={"float32": FLOAT32, "bfloat16": BFLOAT16},
        wrong=wrong,
    )
    sys.exit("\n".join(wrong) or None)


def make_requests() -> tuple[list, list]:
    """Prompts with a shared prefix, and for their last `SCORED` positions the token
    that is there and random candidates: `[prompts, SCORED, CANDIDATES]`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(TEXT.read_text(), verbose=False)["input_ids"]
    rng = np.random.default_rng(0)
    prompts, targets, begin = [], [], SHARED
    for number in range(PROMPTS):
        end = begin + SCORED + number  # of different lengths
        prompts.append(ids[:SHARED] + ids[begin:end])
        rows = rng.integers(0, len(tokenizer), (SCORED, CANDIDATES))
        rows[:, 0] = prompts[-1][-SCORED:]
        targets.append(rows.tolist())
        begin = end
    assert begin <= len(ids), f"{TEXT} is too short"
    return prompts, targets


def hugging_face(prompts: list, targets: list, dtype: str) -> np.ndarray:
    """What `Engine.score` returns, by Transformers in the given type."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype))
    answers = []
    for ids, rows, temperature in zip(prompts, targets, TEMPERATURES):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -SCORED - 1 : -1]
        logprobs = (logits.double() / temperature).log_softmax(-1)
        ordered = logprobs.sort(descending=True).values
        tail = ordered[:, TOP_K:].logsumexp(1, keepdim=True)
        named = logprobs.gather(1, torch.tensor(rows))
        answers.append(torch.cat((named, ordered[:, :TOP_K], tail), 1).numpy())
    return np.array(answers)


def measure(
    runner: str, dtype: str, tensor_parallel: int, prompts: list, targets: list
) -> list[dict]:
    """The cells of one row."""
    cells = []
    cores = sorted(os.sched_getaffinity(0))
    if tensor_parallel > len(cores):
        raise SystemExit(f"--tensor-parallel {tensor_parallel} wants as many cores")
    threads = "|".join(map(str, cores[:tensor_parallel]))
    environ = {"VLLM_CPU_OMP_THREADS_BIND": threads} if tensor_parallel > 1 else {}
    for step, (tokens, blocks) in STEPS.items():
        with Worker(__file__, runner, **environ) as worker:
            worker.call(
                "start",
                dtype=dtype,
                tensor_parallel=tensor_parallel,
                step=tokens,
                blocks=blocks,
            )
            for cached in (True, False):
                for preempt in (False, True):
                    cell = {"step": step, "cached": cached, "preempt": preempt}
                    answer = worker.call(
                        "score",
                        prompts=prompts,
                        targets=targets,
                        cached=cached,
                        preempt=preempt,
                    )
                    cells.append(cell | {"hits": answer.pop("cached")} | answer)
            cells[-1] |= worker.call("score_again", prompts=prompts)
    return cells


def differences(
    logprobs: np.ndarray, truth: np.ndarray, again: np.ndarray | None = None
) -> dict[str, dict]:
    """Of each kind, the greatest and the mean.

    Args:
        again: `[prompts, SCORED]`, of own tokens at temperature 1.
    """
    off = np.abs(logprobs - truth)
    at_one = np.array(TEMPERATURES) == 1
    kinds = {
        "named": off[at_one, :, :CANDIDATES],
        "temperatures": off[~at_one, :, :CANDIDATES],
        "top": off[:, :, CANDIDATES:],
    }
    if again is not None:
        # Hugging Face's at other temperatures are of no use here.
        kinds["score-cached"] = np.abs(again - truth[:, :, 0])[at_one]
    return {
        kind: {"greatest": float(x.max()), "mean": float(x.mean())}
        for kind, x in kinds.items()
    }


def show(off: dict[str, float]) -> str:
    return f"{off['greatest']:.1e} {off['mean']:.0e}"


def check(cell: dict, of_type: dict[str, dict] | None) -> list[str]:
    """What is wrong with a cell: it was not run as its name says, or is too far off.

    Args:
        of_type: how far off Hugging Face is in this type, if it is.
    """
    preempted, in_prompt = cell["preemptions"]
    faults = []
    if cell["cached"] and not (any if cell["preempt"] else all)(cell["hits"]):
        faults.append(f"cache hits are {cell['hits']}")
    if not cell["cached"] and any(cell["hits"]):
        faults.append(f"cache hits are {cell['hits']}")
    if (preempted > 0) != cell["preempt"]:
        faults.append(f"{preempted} preemptions")
    if not all(tokens > SHARED for tokens in cell.get("known", [])):
        faults.append(f"of the second time, {cell['known']} tokens were cached")
    if cell["preempt"] and cell["step"] == "chunked" and not in_prompt:
        faults.append("no preemption in mid-prompt")
    for kind, difference in cell["difference"].items():
        for which, off in difference.items():
            tolerance = BFLOAT16[which] * of_type[kind][which] if of_type else FLOAT32
            if not off <= tolerance:
                faults.append(f"the {which} difference of {kind} is {off}")
    names = ("dtype", "runner", "tensor_parallel", "step", "cached", "preempt")
    return [f"{ {n: cell[n] for n in names} }: {fault}" for fault in faults]


if __name__ == "__main__":
    processes.main(main, Engine)
