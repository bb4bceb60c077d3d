# SPDX-License-Identifier: Apache-2.0
"""`LLM.score_continuations`: several continuations of one context in one call."""

import numpy as np
import pytest
from scoring import (
    FLOAT32_TOLERANCE,
    assert_scores,
    params,
    prompt,
    random_ids,
    run,
    score,
)
from tiny_models import CONFIGS, make_tokenizer

VOCABULARY = CONFIGS["llama"].vocab_size
BLOCK = 32  # the smallest that attention on a CPU takes
MAX_MODEL_LEN = 256
MAX_LOGPROBS = 20  # vLLM's default
CONTEXT = random_ids(1, VOCABULARY, 5 * BLOCK + 5)


@pytest.fixture(params=[1024, 40], ids=["whole", "chunked"])
def llm(request, engine):
    """An engine whose prefix cache is empty."""
    budget = request.param
    llm = engine("llama", block_size=BLOCK, max_num_batched_tokens=budget)
    assert llm.reset_prefix_cache()
    return llm


def assert_continuations(scores, oracle, context, continuations) -> None:
    """Asserts sums, flags and arrays against the oracle."""
    for found, ids in zip(scores, continuations, strict=True):
        assert (found.token_ids, found.num_tokens) == (ids, len(ids))
        assert_scores(found.target_logprobs, oracle, context + ids, ids)
        expected = oracle.scores(context + ids, ids)
        tolerance = len(ids) * FLOAT32_TOLERANCE
        assert abs(found.logprob_sum - expected.logprobs.sum()) <= tolerance
        arrays = found.target_logprobs
        assert found.logprob_sum == arrays.logprobs.sum(dtype=np.float64)
        assert found.is_greedy == (arrays.ranks == 1).all()


def greedy(oracle, context, count: int) -> list[int]:
    """What the model generates greedily, by the oracle."""
    ids = list(context)
    for _ in range(count):
        ids.append(int(oracle.logits(ids)[-1].argmax()))
    return ids[len(context) :]


def test_one_context(llm, oracle):
    lengths = [3, 1, 40, 12, 70]
    continuations = [random_ids(n, VOCABULARY, n) for n in lengths]
    scores = llm.score_continuations(CONTEXT, continuations)
    assert_continuations(scores, oracle("llama"), CONTEXT, continuations)
    # One prefill of the context, whether or not all requests run in the same step.
    cached = [found.num_cached_tokens for found in scores]
    assert cached == [0] + [5 * BLOCK] * 4


def test_what_an_interrupted_call_has_left_is_not_taken_for_scores(llm, oracle):
    left = [prompt(random_ids(n, VOCABULARY, 50), random_ids(n, VOCABULARY, 7)) for n in range(3)]
    llm.enqueue(left, params(max_tokens=0), use_tqdm=False)
    continuations = [random_ids(n, VOCABULARY, 5) for n in (8, 9)]
    scores = llm.score_continuations(CONTEXT, continuations)
    assert_continuations(scores, oracle("llama"), CONTEXT, continuations)


def test_greedy_flag(llm, oracle):
    best = greedy(oracle("llama"), CONTEXT, 4)
    almost = [*best[:3], (best[3] + 1) % VOCABULARY]
    continuations = [best, almost, best[:2], [almost[3], *best]]
    scores = llm.score_continuations(CONTEXT, continuations)
    assert_continuations(scores, oracle("llama"), CONTEXT, continuations)
    assert [found.is_greedy for found in scores] == [True, False, True, False]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_contexts_around_a_block(llm, oracle, length):
    continuations = [random_ids(n, VOCABULARY, 2) for n in (5, 6)]
    scores = llm.score_continuations(CONTEXT[:length], continuations)
    assert_continuations(scores, oracle("llama"), CONTEXT[:length], continuations)
    # The first row needs the hidden state of the last token of the context.
    assert scores[1].num_cached_tokens == (length - 1) // BLOCK * BLOCK


def test_labels_of_one_token_share_a_request(llm, oracle):
    """Also more of them than a request has candidates, and one twice."""
    labels = [[token] for token in random_ids(2, VOCABULARY, MAX_LOGPROBS + 3)]
    labels.append(labels[0])
    scores = llm.score_continuations(CONTEXT, labels)
    assert_continuations(scores, oracle("llama"), CONTEXT, labels)
    cached = [found.num_cached_tokens for found in scores]
    assert [n for n in cached if n] == [5 * BLOCK]  # of the second request
    assert scores[-1].logprob_sum == pytest.approx(scores[0].logprob_sum, abs=1e-4)


def test_batch(llm, oracle):
    """More contexts than run at once, of which some begin alike."""
    rng = np.random.default_rng(0)
    pairs = []
    for number in range(30):
        shared = CONTEXT[: 3 * BLOCK] if number % 2 else []
        context = shared + random_ids(number, VOCABULARY, 1 + 2 * number)
        counts = rng.integers(1, 6, size=1 + number % 4).tolist()
        pairs.append((context, [random_ids(n, VOCABULARY, n) for n in counts]))
    scores = llm.score_continuations(pairs)
    for found, (context, continuations) in zip(scores, pairs, strict=True):
        assert_continuations(found, oracle("llama"), context, continuations)
    assert llm.score_continuations([]) == []


def test_same_numbers_as_by_hand(llm):
    continuations = [random_ids(n, VOCABULARY, n) for n in (2, 3)]
    scores = llm.score_continuations(CONTEXT, continuations)
    for found, ids in zip(scores, continuations):
        by_hand = score(llm, CONTEXT + ids, ids)
        np.testing.assert_allclose(
            found.target_logprobs.logprobs, by_hand.logprobs, atol=FLOAT32_TOLERANCE
        )


def test_without_a_prefix_cache(engine, oracle):
    llm = engine("llama", block_size=BLOCK, enable_prefix_caching=False)
    continuations = [random_ids(n, VOCABULARY, n) for n in (2, 3)]
    scores = llm.score_continuations(CONTEXT, continuations)
    assert_continuations(scores, oracle("llama"), CONTEXT, continuations)
    assert [found.num_cached_tokens for found in scores] == [0, 0]


def test_the_longest_that_fits(llm, oracle):
    ids = random_ids(3, VOCABULARY, MAX_MODEL_LEN - 1 - len(CONTEXT))
    scores = llm.score_continuations(CONTEXT, [ids, ids[:1]])
    assert_continuations(scores, oracle("llama"), CONTEXT, [ids, ids[:1]])


TEXT = "def test_a(server):\n    assert x "
TEXTS = ["== 3", "\n    return server", "is not None", "日本"]


def test_texts(llm, oracle):
    """`"assert x " + "== 3"` has a token that straddles the boundary."""
    tokenizer = make_tokenizer()
    scores = llm.score_continuations(TEXT, TEXTS)
    for found, text in zip(scores, TEXTS, strict=True):
        ids = tokenizer.encode(TEXT + text)
        targets = ids[found.target_logprobs.start :]
        assert_continuations([found], oracle("llama"), ids[: -len(targets)], [targets])
        # Scored is each token that reaches into the text, and no other.
        assert len(tokenizer.decode(ids[: -len(targets)])) <= len(TEXT)
        assert len(tokenizer.decode(ids[: 1 - len(targets) or None])) > len(TEXT)
    ids = tokenizer.encode(TEXT + TEXTS[0])
    assert len(tokenizer.decode(scores[0].token_ids)) > len(TEXTS[0])
    both = llm.score_continuations([(TEXT, TEXTS), (CONTEXT, [[5]])])
    assert [found.token_ids for found in both[0]] == [s.token_ids for s in scores]
    assert both[1][0].token_ids == [5]


@pytest.mark.parametrize(
    ("parameter", "context", "continuations"),
    [
        pytest.param("context", "", ["x"], id="empty-text"),
        pytest.param("context", [], [[5]], id="no-tokens"),
        pytest.param("context", [5, VOCABULARY], [[5]], id="after-the-vocabulary"),
        pytest.param("context", [5] * MAX_MODEL_LEN, [[5]], id="too-long"),
        pytest.param("context", None, [[5]], id="none"),
        pytest.param("context", [5.0], [[5]], id="float"),
        pytest.param("continuations", CONTEXT, [], id="no-continuation"),
        pytest.param("continuations", CONTEXT, [[5], []], id="one-of-no-tokens"),
        pytest.param("continuations", "x", ["y", ""], id="one-empty-text"),
        pytest.param("continuations", "x", "y", id="one-text-alone"),
        pytest.param("continuations", CONTEXT, [5, 6], id="ids-alone"),
        pytest.param("continuations", CONTEXT, ["x"], id="text-after-ids"),
        pytest.param("continuations", "x", [[5]], id="ids-after-text"),
        pytest.param("continuations", CONTEXT, [[5], [VOCABULARY]], id="id-too-large"),
        pytest.param("continuations", CONTEXT, [[-1]], id="negative"),
        pytest.param("continuations", CONTEXT, [[True]], id="bool"),
        pytest.param("continuations", CONTEXT, [[5] * 100], id="one-too-long"),
        pytest.param("continuations", CONTEXT, None, id="none-given"),
    ],
)
def test_refusals(engine, oracle, parameter, context, continuations):
    from vllm.exceptions import VLLMValidationError

    llm = engine("llama", block_size=BLOCK)
    with pytest.raises(VLLMValidationError, match=parameter) as error:
        llm.score_continuations(context, continuations)
    assert error.value.parameter == parameter
    assert not llm.llm_engine.has_unfinished_requests()
    # The other pairs of a batch are not left behind in the engine.
    with pytest.raises(VLLMValidationError):
        llm.score_continuations([(CONTEXT, [[5]]), (context, continuations)])
    assert not llm.llm_engine.has_unfinished_requests()
    scores = llm.score_continuations(CONTEXT, [[5]])
    assert_continuations(scores, oracle("llama"), CONTEXT, [[5]])


def test_the_request_beside_it_generates_as_before(llm):
    """What a call leaves in the cache serves generation."""
    llm.score_continuations(CONTEXT, [[5], [6, 7]])
    (warm,) = run(llm, [prompt(CONTEXT)], params(4))
    assert warm.num_cached_tokens == 5 * BLOCK
    assert llm.reset_prefix_cache()
    (cold,) = run(llm, [prompt(CONTEXT)], params(4))
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
