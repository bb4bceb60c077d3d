# SPDX-License-Identifier: Apache-2.0
"""What scoring costs, against what a user does without it, per scored position.

All paths prefill the same prompt on the same engine. The bound is a plain prefill plus
the LM head's matrix product over the scored rows, in batches of the size that is fastest:
no scoring can do with less.
"""

import numpy as np
import pytest
import torch

POSITIONS = 512
FULL_POSITIONS = 8
ROUNDS = 5


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request, wide_model):
    from vllm import LLM

    return LLM(
        str(wide_model),
        skip_tokenizer_init=True,
        dtype=request.param,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        max_logprobs=-1,
        enable_prefix_caching=False,
        bounded_prompt_logprobs=False,  # upstream's own way, to compare with
        kv_cache_memory_bytes=2**29,
    )


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(0).integers(0, 128_256, POSITIONS + 1).tolist()


def measure(benchmark, llm, tokens, targets=None, **kwargs):
    from vllm import SamplingParams, TokensPrompt

    request = TokensPrompt(prompt_token_ids=tokens)
    if targets is not None:
        request["target_token_ids"] = targets
    params = SamplingParams(detokenize=False, **kwargs)

    def run():
        return llm.generate([request], params, use_tqdm=False)

    describe(benchmark, llm, len(tokens) - 1)
    run()
    benchmark.pedantic(run, rounds=ROUNDS)


def describe(benchmark, llm, positions):
    dtype = llm.model_config.dtype
    benchmark.group = f"{str(dtype).removeprefix('torch.')}, per scored position"
    benchmark.extra_info["positions"] = positions


def test_prefill_alone(benchmark, llm, tokens):
    measure(benchmark, llm, tokens, max_tokens=1)


@pytest.mark.parametrize("rows", [65, 196, 512])
def test_matrix_product_of_the_head_alone(benchmark, llm, rows):
    """The engine takes at most 65 rows of this vocabulary at a time."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    states = torch.randn(POSITIONS, 1024).to(llm.model_config.dtype)
    describe(benchmark, llm, POSITIONS)

    @torch.inference_mode()
    def run():
        for begin in range(0, POSITIONS, rows):
            model.compute_logits(states[begin : begin + rows])

    run()
    benchmark.pedantic(run, rounds=ROUNDS)


def test_target_token_ids(benchmark, llm, tokens):
    measure(benchmark, llm, tokens, tokens[1:], max_tokens=0)


def test_target_token_ids_of_8_candidates(benchmark, llm, tokens):
    targets = np.random.default_rng(1).integers(0, 128_256, (POSITIONS, 8))
    measure(benchmark, llm, tokens, targets, max_tokens=0)


def test_prompt_logprobs_0(benchmark, llm, tokens):
    measure(benchmark, llm, tokens, max_tokens=1, prompt_logprobs=0)


def test_prompt_logprobs_full(benchmark, llm, tokens):
    few = tokens[: FULL_POSITIONS + 1]
    measure(benchmark, llm, few, max_tokens=1, prompt_logprobs=-1)
