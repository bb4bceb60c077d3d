# SPDX-License-Identifier: Apache-2.0
"""The engines of a GPU day: what the parts of `gpu_day_parts.py` call in a worker."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import drafting
import numpy as np
import peak_memory
import processes
from processes import Worker

MODEL = processes.ROOT / "examples" / "reference_model" / "model"
VOCABULARY = 4096  # of the model


class Engine(peak_memory.Engine):
    """In the worker."""

    def close(self) -> None:
        """Lets the engine go, before another takes its place."""
        self.llm = None
        gc.collect()

    def open(self, **options) -> dict:
        """Starts an engine; says what it took of what was asked for."""
        import vllm

        self.llm = vllm.LLM(
            str(MODEL),
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=2**27,
            seed=0,
            gpu_memory_utilization=0.1,  # on a GPU, what has to be free at the start
            **{"dtype": "float32", "enforce_eager": True} | options,
        )
        config = self.llm.llm_engine.vllm_config
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        return {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "type": str(config.model_config.dtype).removeprefix("torch."),
            "attention": runner.attn_groups[0][0].backend.get_name(),
            "asynchronous": bool(config.scheduler_config.async_scheduling),
            "graphs": str(config.compilation_config.cudagraph_mode).split(".")[-1],
        }

    def score(
        self, prompts: list[list[int]], top: list[list[list[int]]], generated: int
    ) -> list[dict]:
        """Scores candidates at every position of each prompt, beside generation."""
        from vllm import SamplingParams, TokensPrompt

        requests = [
            TokensPrompt(prompt_token_ids=ids, target_token_ids=rows)
            for ids, rows in zip(prompts, top)
        ]
        params = [
            SamplingParams(
                max_tokens=generated, temperature=0, ignore_eos=True, target_generated={}
            )
            if n % 2
            else SamplingParams(max_tokens=0)
            for n in range(len(prompts))
        ]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            {
                "logprobs": output.target_logprobs.logprobs,
                "entropy": output.target_logprobs.entropy,
                "tokens": list(output.outputs[0].token_ids),
                "generated": output.outputs[0].target_logprobs,
                "cached": output.num_cached_tokens or 0,
            }
            for output in outputs
        ]

    def decode(
        self, prompts: list[list[int]], depths: list[int | None], generated: int
    ) -> list[dict]:
        """Greedy tokens and their log-probabilities, each prompt to its depth."""
        from vllm import SamplingParams, TokensPrompt

        common = dict(max_tokens=generated, temperature=0, ignore_eos=True, logprobs=0)
        params = [
            SamplingParams(**common | ({"max_depth": depth} if depth else {}))
            for depth in depths
        ]
        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            {
                "tokens": list(choice.token_ids),
                "logprobs": [
                    entry[token].logprob
                    for token, entry in zip(choice.token_ids, choice.logprobs)
                ],
            }
            for choice in (output.outputs[0] for output in outputs)
        ]

    def open_long(self, vocabulary: int, **options) -> None:
        """Starts an engine as `peak_memory.py` does, with prompts of fewer words."""
        peak_memory.VOCABULARY = vocabulary
        self.start(**options)

    def run(self, way: str, rows: int) -> dict:
        """As of `peak_memory.py`; on a GPU, of the device's memory."""
        import torch

        if not torch.cuda.is_available():
            return super().run(way, rows)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        super().run(way, rows)
        return {"peak": torch.cuda.max_memory_allocated(), "before": before}

    def open_wide(self, folder: str, longest: int, step: int) -> None:
        """Starts an engine of a model whose weights do not matter."""
        import torch
        import vllm

        self.llm = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=not torch.cuda.is_available(),  # nothing is learnt from a CPU's
            max_model_len=longest,
            max_num_batched_tokens=step,
            max_num_seqs=256,
            max_logprobs=64,
            kv_cache_memory_bytes=2**33 if torch.cuda.is_available() else 2**27,
            gpu_memory_utilization=0.3,
            seed=0,
        )

    def time(self, prompts: list[list[int]], rows: int, way: str, count: int) -> dict:
        """Seconds and peak memory of scoring the last rows of prompts, and their first
        log-probabilities; the prefix cache is empty before.

        Args:
            rows: of each prompt.
            way: `prefill`, `named`, `top`, or upstream's `prompt_logprobs` or
                `prompt_logprob_token_ids`.
            count: of tokens a row.
        """
        import torch
        from vllm import SamplingParams, TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        fields = [{"max_tokens": 1, "detokenize": False} for _ in prompts]
        for request, field, ids in zip(requests, fields, prompts):
            named = others(ids, rows, max(count, 1))
            if way == "named":
                request["target_token_ids"] = named
            elif way == "top":
                request["target_token_ids"] = ids[-rows:]
                request["target_top_k"] = count
            elif way == "prompt_logprobs":
                field["prompt_logprobs"] = count
            elif way == "prompt_logprob_token_ids":
                field["prompt_logprob_token_ids"] = named
                field["prompt_logprob_start"] = len(ids) - rows - 1
            if way in ("named", "top"):
                field["max_tokens"] = 0
        params = [SamplingParams(**field) for field in fields]
        assert self.llm.reset_prefix_cache()
        before = peak = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() - before
        first = {
            "prefill": lambda one, ids: np.zeros(rows),
            "named": lambda one, ids: one.target_logprobs.logprobs[:, 0],
            "top": lambda one, ids: one.target_logprobs.logprobs[:, 0],
            "prompt_logprobs": lambda one, ids: np.array(
                [
                    entry[token].logprob
                    for entry, token in zip(one.prompt_logprobs[-rows:], ids[-rows:])
                ]
            ),
            "prompt_logprob_token_ids": lambda one, ids: one.prompt_token_id_logprobs[:, 0],
        }[way]
        found = np.array([first(*both) for both in zip(outputs, prompts)], np.float32)
        return {"seconds": seconds, "peak": peak, "logprobs": found}

    def plain_steps(self, batch: int, rounds: int) -> list[float]:
        """Seconds of decode steps of an engine without routing."""
        import test_depth_routing as routing

        routing.fill(self.llm, batch, 32)
        times = [routing.seconds(self.llm) for _ in range(rounds + 3)]
        routing.stop(self.llm, batch)
        return times[3:]

    def open_routing(self, folder: str, dtype: str) -> None:
        """Starts an engine that routes as `test_depth_routing.py` does."""
        import test_depth_routing as routing
        import torch
        import vllm

        self.llm = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",  # no result depends on the weights
            dtype=dtype,
            enforce_eager=not torch.cuda.is_available(),
            max_model_len=routing.LONGEST,
            max_num_batched_tokens=1024,
            max_num_seqs=256,
            kv_cache_memory_bytes=3 * 2**30,
            gpu_memory_utilization=0.3,
            seed=0,
            async_scheduling=False,
            enable_utio=True,
            utio_bucket_cutoffs=list(routing.CUTOFFS),
            utio_bucket_shares=list(routing.SHARES),
            utio_min_batch_size=1,
            utio_gate=False,
        )

    def decode_steps(self, batch: int, rounds: int) -> dict:
        """Seconds of decode steps by way, of `test_depth_routing.py`."""
        import test_depth_routing as routing

        ways = (routing.STAIRCASE, routing.TRUNCATED, routing.SCORED, routing.FALLBACK)
        times = routing.decode_steps(self.llm, batch, 32, ways, rounds)
        routing.stop(self.llm, batch)
        return {name: values.tolist() for name, values in times.items()}

    def open_drafting(self, **options) -> None:
        """Starts an engine as `drafting.py` does."""
        drafting.Engine.start(self, **options)

    generate, counts = drafting.Engine.generate, drafting.Engine.counts

    def lm_eval(self, device: str, questions: int, repeat: int, block: int) -> dict:
        """What `lm_eval_speed.py` measures of the reference model."""
        import lm_eval_speed

        if device == "cuda":  # the work is not this process's
            lm_eval_speed.time = SimpleNamespace(process_time=time.perf_counter)
        args = SimpleNamespace(
            block_size=block, case=["same shots"], questions=questions, repeat=repeat
        )
        return lm_eval_speed.measure_model(MODEL, args)["same shots"]


def others(ids: list[int], rows: int, count: int) -> list[list[int]]:
    """The last tokens of a prompt, each with others, `count` a row."""
    rng = np.random.default_rng(len(ids))
    named = rng.integers(0, VOCABULARY, (rows, count))
    named[:, 0] = ids[-rows:]
    return named.tolist()


_idle: dict[tuple[str, bool], list[Worker]] = {}
"""Workers that a dry run has kept, by runner and whether they have the release."""


@contextmanager
def worker(device: str, runner: str, upstream: bool = False) -> Iterator[Worker]:
    """A worker on a runner; on a GPU without what V2 needs on a CPU.

    On a GPU each is a new process, which ends with its engine and leaves no memory taken.
    A dry run takes one again: to import vLLM is most of what a small engine costs.
    """
    if device == "cuda":
        chosen = str(int(runner == "v2"))
        started = Worker(__file__, "v1", upstream=upstream, VLLM_USE_V2_MODEL_RUNNER=chosen)
        with started as engine:
            yield engine
        return
    idle = _idle.setdefault((runner, upstream), [])
    engine = idle.pop() if idle else Worker(__file__, runner, upstream=upstream)
    try:
        yield engine
        engine.call("close")
    except BaseException:
        engine.__exit__()
        raise
    idle.append(engine)


def main() -> None:
    sys.exit("error: gpu_day_parts.py starts this")


if __name__ == "__main__":
    processes.main(main, Engine)
