# SPDX-License-Identifier: Apache-2.0
"""Scores at a temperature, and the most probable tokens beside them, against Hugging
Face float32."""

import numpy as np
import pytest
from scoring import (
    assert_options,
    assert_same_scores,
    assert_scores,
    params,
    prompt,
    random_ids,
    run,
)
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
PROMPT = random_ids(2, VOCABULARY, 50)
MAX_LOGPROBS = 20  # vLLM's default


def request(ids, targets=None, **options):
    made = prompt(ids, targets)
    for name, value in options.items():
        made[f"target_{name}"] = value
    return made


@pytest.mark.parametrize("family", CONFIGS)
def test_families(engine, oracle, family):
    """Requests of all kinds in one batch."""
    vocabulary = CONFIGS[family].vocab_size
    cases = []
    for seed, options in enumerate(
        [
            {},
            {"temperature": 0.5},
            {"temperature": np.int8(3), "top_k": np.int8(1)},
            {"top_k": MAX_LOGPROBS},
            {"temperature": np.float32(1.25), "top_k": np.int64(7)},
        ]
    ):
        for ids in (random_ids(seed, vocabulary, n) for n in (2, 30, 90)):
            targets = random_ids(seed, vocabulary, len(ids) // 2, 3)
            cases.append((ids, targets, options))
            if "top_k" in options:
                cases.append((ids, None, options))
                cases.append((ids, [[]] * (len(ids) // 2), options))
    requests = [request(ids, rows, **options) for ids, rows, options in cases]
    for output, (ids, rows, options) in zip(
        run(engine(family), requests, params()), cases
    ):
        assert_options(output.target_logprobs, oracle(family), ids, rows, **options)


def test_equal_logits_come_by_token(engine, model_folder, tmp_path):
    """A head whose rows are the same in pairs: bfloat16 is not needed for ties."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm import LLM

    folder = model_folder("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = model.lm_head.weight.data
    head[1::2] = head[: len(head) - len(head) % 2 : 2]
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head.clone())
    model.save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=2**26,
    )
    (output,) = run(llm, [request(PROMPT, top_k=8)], params(detokenize=False))
    top = output.target_logprobs.top_token_ids
    assert (top[:, ::2] + 1 == top[:, 1::2]).all() and (top[:, ::2] % 2 == 0).all()
    values = output.target_logprobs.top_logprobs
    np.testing.assert_array_equal(values[:, ::2], values[:, 1::2])


def test_temperature_1_changes_no_bit(llm):
    plain, named = run(
        llm, [request(PROMPT, PROMPT[1:], temperature=t) for t in (1, 1.0)], params()
    )
    (without,) = run(llm, [prompt(PROMPT, PROMPT[1:])], params())
    for output in (plain, named):
        assert_same_scores(output.target_logprobs, without.target_logprobs)


def test_unscored_rows(llm, llama):
    targets = [[5, -1], [-1, -1], [-1, 9], [-1, -1]]
    (output,) = run(llm, [request(PROMPT, targets, top_k=3)], params())
    scores = output.target_logprobs
    assert_scores(scores, llama, PROMPT, targets)
    unscored = np.array([False, True, False, True])
    assert np.array_equal((scores.top_token_ids == -1).all(axis=1), unscored)
    assert np.array_equal((scores.top_logprobs == -np.inf).all(axis=1), unscored)
    assert np.array_equal(np.isnan(scores.tail_logprob), unscored)


def test_the_prefix_cache_is_read(llm, llama):
    ids = random_ids(3, VOCABULARY, 200)
    for _ in range(2):
        (output,) = run(
            llm, [request(ids, ids[-8:], temperature=0.8, top_k=4)], params()
        )
        scores = output.target_logprobs
        assert_options(scores, llama, ids, ids[-8:], temperature=0.8, top_k=4)
    assert output.num_cached_tokens > 100


def test_generation_goes_on_after_it(llm):
    (plain,) = run(llm, [prompt(PROMPT)], params(6))
    (output,) = run(llm, [request(PROMPT, temperature=9, top_k=2)], params(6))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.target_logprobs.top_token_ids.shape == (len(PROMPT) - 1, 2)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        *(
            ({"targets": [5], "temperature": value}, "target_temperature")
            for value in (
                *(0, -1.0, float("nan"), float("inf"), "1", True, [1], 1e-45),
                *(np.float16(0), np.float16("inf"), 10**400),
            )
        ),
        *(
            ({"targets": targets, "top_k": value}, "target_top_k")
            for value in (0, -1, MAX_LOGPROBS + 1, 2**70, 1.0, "1", False, [1])
            for targets in (None, [5])
        ),
        ({"temperature": 2.0}, "target_temperature"),
        ({"targets": [], "top_k": 2}, "target_token_ids"),
        ({"targets": [[]] * len(PROMPT), "top_k": 2}, "target_token_ids"),
        ({"targets": [VOCABULARY], "top_k": 2}, "target_token_ids"),
        ({"ids": [5], "top_k": 2}, "target_top_k"),
        ({"sampling": {"prompt_logprobs": 1}, "top_k": 2}, "target_top_k"),
    ],
    ids=repr,
)
def test_refused(llm, llama, options, parameter):
    from vllm.exceptions import VLLMValidationError

    options = dict(options)
    ids, sampling = options.pop("ids", PROMPT), options.pop("sampling", {})
    with pytest.raises(VLLMValidationError, match=parameter) as error:
        run(llm, [request(ids, **options)], params(**sampling))
    assert error.value.parameter == parameter
    (output,) = run(llm, [prompt(PROMPT, [5])], params())
    assert_scores(output.target_logprobs, llama, PROMPT, [5])


@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_a_text_prompt(llm, name):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"target_{name}"):
        run(llm, [{"prompt": "def f", f"target_{name}": 2}], params(1))
