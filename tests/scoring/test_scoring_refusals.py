# SPDX-License-Identifier: Apache-2.0
"""What a scoring request may not be: each is refused at the call, by name, and the
engine goes on serving."""

import numpy as np
import pytest
from scoring import assert_scores, params, prompt, random_ids, run, score
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
PROMPT = random_ids(1, VOCABULARY, 12)
MAX_LOGPROBS = 20  # vLLM's default


@pytest.fixture
def refused(llm, oracle):
    """Calls `generate`, expects a refusal that names the parameter, and scores a
    prompt afterwards."""
    from vllm.exceptions import VLLMValidationError

    def check(requests, sampling_params, parameter="target_token_ids", on=llm, **kw):
        with pytest.raises(VLLMValidationError, match=parameter) as error:
            on.generate(requests, sampling_params, use_tqdm=False, **kw)
        assert error.value.parameter == parameter
        assert not on.llm_engine.has_unfinished_requests()
        scores = score(on, PROMPT, PROMPT[1:])
        assert_scores(scores, oracle("llama"), PROMPT, PROMPT[1:])

    return check


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([], id="no-rows"),
        pytest.param([[]], id="one-empty-row"),
        pytest.param([[], [], []], id="empty-rows"),
        pytest.param(np.zeros((0, 2), dtype=np.int64), id="array-without-rows"),
        pytest.param(np.zeros((3, 0), dtype=np.int64), id="array-without-columns"),
        pytest.param([5] * len(PROMPT), id="a-row-too-many"),
        pytest.param([5] * 1000, id="many-rows-too-many"),
        pytest.param(np.zeros((len(PROMPT), 1), dtype=np.int64), id="array-too-long"),
        pytest.param([5, VOCABULARY], id="id-after-the-vocabulary"),
        pytest.param(np.array([[5, VOCABULARY]]), id="array-id-after-the-vocabulary"),
        pytest.param([5, 2**31 + 5], id="id-beyond-int32"),
        pytest.param([5, 2**64 + 5], id="id-beyond-int64"),
        pytest.param(np.array([[2**64 - 1]], dtype=np.uint64), id="uint64-minus-one"),
        pytest.param([5, -2], id="below-minus-one"),
        pytest.param([[5, -2]], id="below-minus-one-in-a-row"),
        pytest.param([True, False], id="bool"),
        pytest.param([[5, True]], id="bool-in-a-row"),
        pytest.param(np.array([[True]]), id="bool-array"),
        pytest.param([5.0], id="float"),
        pytest.param([[5, 6.5]], id="float-in-a-row"),
        pytest.param(np.array([[5.0]]), id="float-array"),
        pytest.param([5, float("nan")], id="nan"),
        pytest.param([5, None], id="none"),
        pytest.param(["5"], id="string-in-the-list"),
        pytest.param("5", id="string"),
        pytest.param(b"5", id="bytes"),
        pytest.param(5, id="number"),
        pytest.param({5: 6}, id="dict"),
        pytest.param([{5}], id="set-in-the-list"),
        pytest.param([5, [6]], id="id-beside-a-row"),
        pytest.param([[6], 5], id="row-beside-an-id"),
        pytest.param([[[5]]], id="three-deep"),
        pytest.param([[5], [[6]]], id="three-deep-in-one-row"),
        pytest.param(np.zeros((2, 1, 1), dtype=np.int64), id="array-3d"),
        pytest.param(np.array(5), id="array-0d"),
        pytest.param(np.array([[5], [6, 7]], dtype=object), id="object-array"),
        pytest.param([[5] * (MAX_LOGPROBS + 1)], id="too-many-candidates"),
        pytest.param([[5], [-1] * (MAX_LOGPROBS + 1)], id="too-many-unscored"),
        pytest.param(
            np.zeros((2, MAX_LOGPROBS + 1), dtype=np.int32), id="array-too-wide"
        ),
    ],
)
def test_malformed_targets(refused, targets):
    refused([prompt(PROMPT, targets)], params())


@pytest.mark.parametrize("ids", [[5], [5, 6]], ids=["one-token", "two-tokens"])
def test_a_prompt_without_a_predicted_token_for_every_row(refused, ids):
    refused([prompt(ids, ids)], params())


def test_a_text_prompt(refused):
    refused([{"prompt": "def f(x):", "target_token_ids": [5]}], params())


def test_an_embeddings_prompt(engine, refused):
    import torch

    embeds = torch.zeros(4, CONFIGS["llama"].hidden_size)
    refused(
        [{"prompt_embeds": embeds, "target_token_ids": [5]}],
        params(1),
        on=engine("llama", enable_prompt_embeds=True),
    )


def test_truncation_which_would_shift_the_rows(refused):
    refused(
        [prompt(PROMPT, [5])],
        params(),
        tokenization_kwargs={"truncate_prompt_tokens": 4},
    )


def test_both_names_at_once(refused):
    rows = [[5]] * (len(PROMPT) - 1)
    refused([prompt(PROMPT, rows)], params(prompt_logprob_token_ids=rows, max_tokens=1))


def test_one_bad_request_among_good_ones(refused):
    good = prompt(PROMPT, PROMPT[1:])
    refused([good, prompt(PROMPT, [VOCABULARY]), good], params())


def test_beam_search(llm, oracle):
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    with pytest.raises(VLLMValidationError, match="target_token_ids"):
        llm.beam_search(
            [prompt(PROMPT, [5])], BeamSearchParams(beam_width=2, max_tokens=2)
        )
    assert_scores(score(llm, PROMPT, [5]), oracle("llama"), PROMPT, [5])


def test_max_tokens_0_with_nothing_to_score(refused):
    refused([prompt(PROMPT)], params(0), parameter="max_tokens")


def test_negative_max_tokens():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="max_tokens"):
        SamplingParams(max_tokens=-1)


def test_no_limit_on_candidates_is_still_the_vocabulary(engine, refused):
    """`max_logprobs=-1` allows as many candidates as there are words."""
    llm = engine("llama", max_logprobs=-1)
    ids = [list(range(VOCABULARY)) + [0]]
    refused([prompt(PROMPT, ids)], params(), on=llm)
    (output,) = run(llm, [prompt(PROMPT, [ids[0][:-1]])], params())
    assert output.target_logprobs.logprobs.shape == (1, VOCABULARY)
