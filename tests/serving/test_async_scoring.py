# SPDX-License-Identifier: Apache-2.0
"""Scoring through `AsyncLLM`, whose engine and worker are processes of their own:
requests and results cross process boundaries here."""

import asyncio
import gc
import weakref

import forks
import numpy as np
import pytest
from conftest import engine_options
from scoring import assert_generated, assert_scores, params, prompt, random_ids
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size


@pytest.fixture(scope="module")
def serve(runner, model_folder):
    """Runs a coroutine function on a started `AsyncLLM`."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with asyncio.Runner() as loop, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

        async def start():
            options = engine_options() | {"max_num_batched_tokens": 64}
            model = str(model_folder("llama"))
            with forks.for_engines():
                return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **options))

        llm = loop.run(start())
        served = weakref.proxy(llm)
        yield lambda use: loop.run(use(served))
        llm.shutdown()
        # It is in cycles, and complains if it goes with the interpreter.
        del llm
        gc.collect()


async def last_output(llm, request, sampling, name: str):
    outputs = [output async for output in llm.generate(request, sampling, name)]
    return outputs[-1]


def test_concurrent_requests(serve, llama):
    prompts = [random_ids(n, VOCABULARY, 10 + 13 * n) for n in range(10)]
    targets = [
        np.array(random_ids(n, VOCABULARY, len(p) - 1, 1 + n)) if n % 2 else p[1:]
        for n, p in enumerate(prompts)
    ]

    async def use(llm):
        return await asyncio.gather(
            *(
                last_output(llm, prompt(p, t), params(n % 3), f"r{n}")
                for n, (p, t) in enumerate(zip(prompts, targets))
            )
        )

    for n, output in enumerate(serve(use)):
        assert len(output.outputs[0].token_ids) == n % 3
        assert_scores(output.target_logprobs, llama, prompts[n], targets[n])


def test_prompt_logprobs_are_filled_in(serve, llama):
    ids = random_ids(1, VOCABULARY, 90)

    async def use(llm):
        sampling = params(1, prompt_logprobs=0)
        return await last_output(llm, prompt(ids, ids[-3:]), sampling, "a")

    output = serve(use)
    assert_scores(output.target_logprobs, llama, ids, ids[-3:])
    assert output.prompt_logprobs[:-3] == [None] * (len(ids) - 3)
    got = [entry[i].logprob for i, entry in zip(ids[-3:], output.prompt_logprobs[-3:])]
    assert got == output.target_logprobs.logprobs[:, 0].tolist()


@pytest.mark.parametrize("kind", ["FINAL_ONLY", "DELTA", "CUMULATIVE"])
def test_n_sequences(serve, llama, kind):
    from vllm.sampling_params import RequestOutputKind

    ids = random_ids(2, VOCABULARY, 70)

    async def use(llm):
        sampling = params(2, n=3, temperature=1.0, seed=7)
        sampling.output_kind = RequestOutputKind[kind]
        return [out async for out in llm.generate(prompt(ids, ids[1:]), sampling, kind)]

    outputs = serve(use)
    assert outputs[-1].finished
    scores = [out.target_logprobs for out in outputs if out.target_logprobs is not None]
    assert_scores(scores[0], llama, ids, ids[1:])
    if kind != "DELTA":
        assert_scores(outputs[-1].target_logprobs, llama, ids, ids[1:])


def test_a_cancelled_request_leaves_the_engine_serving(serve, llama):
    ids = random_ids(3, VOCABULARY, 200)

    async def use(llm):
        task = asyncio.create_task(
            last_output(llm, prompt(ids, ids[1:]), params(40), "gone")
        )
        await asyncio.sleep(0)  # lets it start
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await last_output(llm, prompt(ids, ids[1:]), params(), "next")

    assert_scores(serve(use).target_logprobs, llama, ids, ids[1:])


def test_bad_targets_are_refused_at_the_call(serve, llama):
    from vllm.exceptions import VLLMValidationError

    ids = random_ids(4, VOCABULARY, 20)

    async def use(llm):
        for targets in ([VOCABULARY], [5] * 20, [[5, True]]):
            with pytest.raises(VLLMValidationError, match="target_token_ids"):
                await last_output(llm, prompt(ids, targets), params(), "bad")
        return await last_output(llm, prompt(ids, ids[1:]), params(), "good")

    assert_scores(serve(use).target_logprobs, llama, ids, ids[1:])


@pytest.mark.parametrize("name", ["target_token_ids", "prompt_logprob_token_ids"])
def test_streaming_input_is_refused(serve, llama, name):
    """A session whose prompt goes on growing has no end to align the rows to, and no
    states of what it has read before."""
    from vllm.engine.protocol import StreamingInput
    from vllm.exceptions import VLLMValidationError

    ids = random_ids(5, VOCABULARY, 20)

    async def pieces(llm):
        targets = ids[1:] if name == "target_token_ids" else None
        rendered = await llm.renderer.render_cmpl_async([prompt(ids, targets)])
        yield StreamingInput(prompt=rendered[0])

    async def use(llm):
        rows = {} if name == "target_token_ids" else {name: [[i] for i in ids[1:]]}
        with pytest.raises(VLLMValidationError, match=name) as error:
            await last_output(llm, pieces(llm), params(1, **rows), "stream")
        assert error.value.parameter == name
        return await last_output(llm, prompt(ids, ids[1:]), params(), "good")

    assert_scores(serve(use).target_logprobs, llama, ids, ids[1:])


def test_scores_of_generated_tokens(serve, llama):
    """Streams of deltas, of which a slow reader gets several in one."""
    from vllm.sampling_params import RequestOutputKind

    prompts = [random_ids(n, VOCABULARY, 10 + 20 * n) for n in range(6)]
    asked = [{}, {"top_k": 20}, {"token_ids": [1, 2], "top_k": 2, "temperature": 3.0}]

    async def read(llm, n):
        kind = RequestOutputKind.DELTA if n % 2 else RequestOutputKind.FINAL_ONLY
        sampling = params(12, target_generated=asked[n % 3], output_kind=kind)
        first, position = None, len(prompts[n])
        async for output in llm.generate(prompt(prompts[n]), sampling, f"g{n}"):
            scores = output.outputs[0].target_logprobs
            assert scores.start == position
            position += len(scores.logprobs)
            if first is None:
                first = output
            else:
                first.add(output, aggregate=True)
            await asyncio.sleep(0.05 * (n == 3))
        return first

    async def use(llm):
        return await asyncio.gather(*(read(llm, n) for n in range(len(prompts))))

    for n, output in enumerate(serve(use)):
        (completion,) = output.outputs
        assert len(completion.token_ids) == 12
        assert_generated(completion, llama, prompts[n], asked[n % 3])
