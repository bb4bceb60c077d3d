# SPDX-License-Identifier: Apache-2.0
"""Routing of decode tokens by depth: the right token, the right depth, every logit."""

import math

import numpy as np
import pytest
import torch
from compiling import compiling
from depth_routing import (
    CACHES,
    CUTOFFS,
    NUM_LAYERS,
    TOLERANCE,
    Planted,
    Request,
    assert_logits,
    expected_logits,
    logits_options,
    mlp_rows,
    poison_cache,
    random_plan,
    routing,
    serve,
)
from oracle import log_softmax
from scoring import params, prompt, random_ids
from tiny_models import CONFIGS

FAMILIES = [family for family in CONFIGS if family.startswith("deep_")]
VOCABULARY = CONFIGS["deep_llama"].vocab_size
BLOCK = 32


@pytest.fixture
def llm(engine):
    return engine("deep_llama", **routing())


@pytest.fixture
def llama(depth_oracle):
    return depth_oracle("deep_llama")


def request(seed: int, length: int, max_tokens: int = 8, **kwargs) -> Request:
    return Request(random_ids(seed, VOCABULARY, length), max_tokens, **kwargs)


def traffic() -> list[Request]:
    """Requests that join while others decode, with prompts of one token to two
    chunks, and leave one by one."""
    lengths = [1, 70, 33, 5, 32, 90, 64, 2, 31, 40]
    return [
        request(n, length, max_tokens=1 + 3 * n % 10, arrival=3 * n % 8)
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_the_oracle(engine, depth_oracle, family):
    """A random depth for each token, in batches of prefill and decode."""
    llm = engine(family, **routing())
    requests = serve(llm, traffic(), random_plan(0))
    assert {d for r in requests for d in r.depths} == set(CUTOFFS)
    assert_logits(depth_oracle(family), requests)


def test_every_batch_size(runner, engine, llama):
    """The right token gets the right depth: each request has a plan of its own."""
    # Kernels in Triton's interpreter take a tenth of a second a step.
    sizes = range(1, 65) if runner == "v1" else (1, 2, 3, 5, 8, 15, 16, 17, 33, 64)
    llm = engine("deep_llama", **routing(max_num_seqs=64, max_num_batched_tokens=256))
    prompts = [random_ids(100 + n, VOCABULARY, 2 + n % 3) for n in range(64)]
    for size in sizes:
        requests = [Request(p, max_tokens=3) for p in prompts[:size]]
        serve(llm, requests, random_plan(size % 4))
        assert all(len(r.depths) == 2 for r in requests)
        assert_logits(llama, requests)


@pytest.mark.parametrize("depth", CUTOFFS)
def test_all_tokens_exit_together(llm, llama, depth):
    """At the first cutoff, no row runs the layers after it."""
    requests = [request(20 + n, 8 * n + 1) for n in range(8)]
    serve(llm, requests, lambda number, step: depth)
    assert_logits(llama, requests, depth)


def test_the_skipped_layers_do_no_work(llm):
    assert llm.reset_prefix_cache()
    with mlp_rows(llm) as rows:
        requests = serve(llm, traffic(), random_plan(1))
    prefill = sum(len(r.prompt) for r in requests)
    depths = np.concatenate([r.depths for r in requests])
    assert len(depths) == sum(r.max_tokens - 1 for r in requests)
    assert rows == [prefill + (depths > layer).sum() for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("cutoffs", [(1,), (1, 2, 3, 4, 5), (6,), (5, 6)])
def test_other_cutoffs(engine, llama, cutoffs):
    llm = engine("deep_llama", **routing(utio_bucket_cutoffs=cutoffs))
    requests = [request(30 + n, 10 * n + 1) for n in range(7)]
    serve(llm, requests, random_plan(2, sorted({*cutoffs, NUM_LAYERS})))
    assert_logits(llama, requests)


# What a step's last prompt token is and what a decode token is


def test_a_prompts_last_token_alone_in_a_step_runs_all_layers(engine, llama):
    """A chunk of one token looks like a decode step, and so does a prompt of which
    all but one token are cached."""
    llm = engine("deep_llama", **routing(max_num_batched_tokens=BLOCK))
    assert llm.reset_prefix_cache()
    plan = random_plan(3, CUTOFFS[:1])
    first = serve(llm, [request(40, BLOCK + 1)], plan)
    again = serve(llm, [request(40, BLOCK + 1)], plan)
    assert first[0].output.num_cached_tokens == 0
    assert again[0].output.num_cached_tokens == BLOCK
    assert_logits(llama, first + again)


# The KV cache


@pytest.mark.parametrize("family", CACHES)
def test_no_unwritten_slot_is_read(engine, depth_oracle, family):
    llm = engine(family, **routing())
    poison_cache(llm)
    for seed in range(2):  # the second time in the blocks of the first
        requests = serve(llm, traffic(), random_plan(seed))
        assert_logits(depth_oracle(family), requests)


def test_nothing_of_what_was_in_the_cache_shows(llm):
    """The same traffic on a poisoned and on a used cache, to the bit."""
    served = []
    for _ in range(2):
        poison_cache(llm)
        served.append(serve(llm, traffic(), random_plan(4)))
    assert llm.reset_prefix_cache()
    served.append(serve(llm, traffic(), random_plan(4)))
    for first, second, third in zip(*served):
        np.testing.assert_array_equal(first.logits, second.logits)
        np.testing.assert_array_equal(first.logits, third.logits)


@pytest.mark.parametrize("family", CACHES)
def test_full_depth_requests_read_no_key_of_reduced_depth(engine, depth_oracle, family):
    """After routed traffic, a full-depth request with its prompt and continuation
    gives the bits of an engine on which nothing was ever routed."""
    routed, fresh = (
        engine(family, **routing(max_num_batched_tokens=1024, seed=seed, **CACHES[family]))
        for seed in (0, 1)  # two engines
    )
    plain = engine(family, **logits_options(max_num_batched_tokens=1024, **CACHES[family]))
    lengths = [20, 32, 40, 64, 70]
    asked = [request(50 + n, length, 60) for n, length in enumerate(lengths)]
    for llm in (routed, fresh, plain):
        assert llm.reset_prefix_cache()
    serve(routed, asked, random_plan(5, CUTOFFS[:2]))
    for llm in (fresh, plain):
        # The prompts alone, in the same batch, leave the same blocks.
        serve(llm, [Request(r.prompt, 1) for r in asked])
    for source in asked:
        longer = source.prompt + source.tokens
        served = [serve(llm, [Request(longer, 6)])[0] for llm in (routed, fresh, plain)]
        for one in served:
            cached = one.output.num_cached_tokens
            assert cached == len(source.prompt) // BLOCK * BLOCK
            np.testing.assert_array_equal(one.logits, served[2].logits)
        assert_logits(depth_oracle(family), served, NUM_LAYERS)


def test_the_second_of_two_equal_prompts_shares_only_the_prompt(llm, llama):
    """While the first one decodes."""
    assert llm.reset_prefix_cache()
    first = request(60, 2 * BLOCK, 50)
    serve(llm, [first], random_plan(6))
    longer = first.prompt + first.tokens
    requests = [
        Request(first.prompt, 50),
        Request(first.prompt, 50, arrival=4),
        Request(longer, 8, arrival=45),
    ]
    serve(llm, requests, random_plan(7))
    # 2 * BLOCK tokens are two whole blocks, the last of which is computed again.
    cached = [r.output.num_cached_tokens for r in requests]
    assert cached == [BLOCK, BLOCK, 2 * BLOCK]
    assert_logits(llama, requests)


# Preemption: a resumed request prefills what it has, through all layers


def test_preempted_requests(engine, llama):
    """Six requests that each grow to four blocks, in a cache of twelve."""
    llm = engine(
        "deep_llama",
        **routing(
            max_model_len=128, num_gpu_blocks_override=12, max_num_batched_tokens=128
        ),
    )
    requests = [request(70 + n, 60, 50) for n in range(6)]
    serve(llm, requests, random_plan(8))
    assert any(r.preempted - {0} for r in requests), "the cache was large enough"
    assert_logits(llama, requests)


def test_preempted_at_every_step(llm, llama):
    """All running requests are thrown out and start again."""
    plan = random_plan(9)
    for step in (1, 2, 5):
        requests = [request(80 + n, 30 + n, 8) for n in range(3)]
        serve(llm, requests, plan, interrupt_at=step)
        assert all(r.preempted for r in requests)
        assert_logits(llama, requests)


def test_aborted_requests_leave_nothing(llm, llama):
    Planted.expect(lambda request_id, step: 2)
    engine = llm.llm_engine
    for n in range(5):
        ids = random_ids(90 + n, VOCABULARY, 20)
        engine.add_request(f"gone{n}", prompt(ids), params(100))
    for _ in range(4):
        engine.step()
    engine.abort_request([f"gone{n}" for n in range(5)])
    requests = serve(llm, traffic(), random_plan(10))
    assert_logits(llama, requests)


# Beside other features


def test_scored_prompts_in_the_same_batches(llm, llama, oracle):
    ids = [random_ids(200 + n, VOCABULARY, 70) for n in range(3)]
    routed = [request(210 + n, 20, 12) for n in range(4)]
    for n, own in enumerate(ids):
        llm.llm_engine.add_request(f"score{n}", prompt(own, own[1:]), params())
    scored = {}
    serve(llm, routed, random_plan(11), others=scored)
    assert len(scored) == 3
    for n, own in enumerate(ids):
        scores = scored[f"score{n}"].target_logprobs
        # In this engine's mode the log-probabilities are logits.
        expected = oracle("deep_llama").scores(own, own[1:])
        rows = np.arange(len(own) - 1)
        logits = expected.logits[rows, own[1:]]
        np.testing.assert_allclose(scores.logprobs[:, 0], logits, atol=TOLERANCE)
    assert_logits(llama, routed)


def test_parallel_sampling(llm, llama):
    """Each sequence of a request has its own depths."""
    requests = [request(220, 40, 6, options=dict(n=3, temperature=1.0))]
    serve(llm, requests, lambda number, step: CUTOFFS[step % 3])
    completions = requests[0].output.outputs
    assert len({tuple(c.token_ids) for c in completions}) == 3
    depths = [CUTOFFS[step % 3] for step in range(6)]
    for completion in completions:
        one = Request(requests[0].prompt, depths=depths)
        one.take(completion)
        assert_logits(llama, [one])


# Scores


def test_the_score_is_the_entropy_of_the_requests_own_last_logits(engine):
    options = routing(utio_score_weights=(1.0, 0.0, 0.0))
    requests = serve(engine("deep_llama", **options), traffic(), random_plan(12))
    for served in requests:
        logprobs = log_softmax(served.logits)
        entropy = -(np.exp(logprobs) * logprobs).sum(axis=1) / math.log(VOCABULARY)
        np.testing.assert_allclose(served.scores, entropy[:-1], rtol=0, atol=1e-5)


def test_the_score_of_hidden_states(engine, llama):
    """Requests in step with one another, so that their batch is known."""
    requests = [request(230 + n, 10, 6) for n in range(6)]
    states = None
    for weights in ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (2.0, 1.0, 1.0)):
        llm = engine("deep_llama", **routing(utio_score_weights=weights))
        serve(llm, requests, random_plan(13))
        states = np.stack(
            [llama.states(r.prompt, r.tokens, r.depths) for r in requests]
        )[:, :-1]  # [requests, steps, hidden size]
        norms = np.linalg.norm(states, axis=2)
        mean = states.mean(axis=0)
        cosine = (states * mean).sum(axis=2) / (norms * np.linalg.norm(mean, axis=1))
        logprobs = log_softmax(np.stack([r.logits for r in requests])[:, :-1])
        entropy = -(np.exp(logprobs) * logprobs).sum(axis=2) / math.log(VOCABULARY)
        terms = entropy, norms / norms.max(axis=0), (1 - cosine) / 2
        expected = sum(w * t for w, t in zip(weights, terms)) / sum(weights)
        scores = np.array([r.scores for r in requests])
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


# Fallbacks


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(utio_min_batch_size=1000), id="small-batch"),
        pytest.param(dict(utio_min_bucket=1000), id="small-buckets"),
        pytest.param(dict(utio_min_depth=NUM_LAYERS), id="min-depth"),
    ],
)
def test_a_fallback_is_full_depth(engine, options):
    engines = [
        engine("deep_llama", **logits_options()),
        engine("deep_llama", **routing(**options)),
    ]
    for llm in engines:
        # Or one of them prefills what the other has cached, in products of other shapes.
        assert llm.reset_prefix_cache()
    plain, fallen = (serve(llm, traffic(), lambda number, step: 2) for llm in engines)
    for one, other in zip(plain, fallen):
        np.testing.assert_array_equal(one.logits, other.logits)


def test_min_depth(engine, llama):
    llm = engine("deep_llama", **routing(utio_min_depth=3))
    requests = serve(llm, traffic(), random_plan(14))
    for served in requests:
        served.depths = [max(depth, 4) for depth in served.depths]
    assert_logits(llama, requests)


def test_min_bucket(engine, llama):
    """Three leave at 2, one at 4, so that it goes on."""
    llm = engine("deep_llama", **routing(utio_min_bucket=2))
    plan = [2, 2, 2, 4, 6, 6]
    requests = [request(240 + n, 20) for n in range(6)]
    serve(llm, requests, lambda number, step: plan[number])
    for number, served in enumerate(requests):
        assert_logits(llama, [served], [2, 2, 2, 6, 6, 6][number])


def test_min_batch_size(engine, llama):
    """Four requests of ten, six, six and two tokens; routed while three decode."""
    llm = engine("deep_llama", **routing(utio_min_batch_size=3))
    requests = [request(250 + n, 5, count) for n, count in enumerate([10, 6, 6, 2])]
    serve(llm, requests, lambda number, step: 2)
    for served in requests:
        routed = min(served.max_tokens, 6) - 1
        assert len(served.depths) == routed
        served.depths = [2] * routed + [NUM_LAYERS] * 10
    assert_logits(llama, requests)


def test_bfloat16(engine, depth_oracle):
    """Routed logits are as near to float32 arithmetic on the same weights as those at
    full depth are."""
    exact = depth_oracle("deep_llama", weights=torch.bfloat16)

    def error(requests, depths=None) -> float:
        """Root mean square over all logits."""
        return math.sqrt(
            np.mean(
                np.concatenate(
                    [
                        (r.logits - expected_logits(exact, r, depths or r.depths)) ** 2
                        for r in requests
                    ]
                )
            )
        )

    full_depth = [NUM_LAYERS] * 20
    plain = engine("deep_llama", dtype="bfloat16", **logits_options())
    noise = error(serve(plain, traffic()), full_depth)
    llm = engine("deep_llama", dtype="bfloat16", **routing())
    routed = serve(llm, traffic(), random_plan(16))
    assert error(routed) < 1.5 * noise
    assert error(routed, full_depth) > 5 * noise  # wrong depths would show


def test_without_eager_depths_are_not_ignored(engine, llama, tmp_path):
    """As a graph that was traced without them would."""
    with compiling(tmp_path, "eager"):
        options = dict(enforce_eager=False, max_num_batched_tokens=62)  # no other's
        llm = engine("deep_llama", **routing(**options))
    requests = serve(llm, traffic(), random_plan(15))
    assert_logits(llama, requests)


def test_the_default_policy(engine, llama):
    """Of the tokens with the lowest scores, the shares that were asked for."""
    options = routing(utio_bucket_shares=(0.5, 0.25, 0.25))
    del options["utio_policy"]
    llm = engine("deep_llama", **options)
    requests = [request(260 + n, 10, 5) for n in range(8)]
    assert llm.reset_prefix_cache()
    with mlp_rows(llm) as rows:
        serve(llm, requests)
    decodes = 8 * 4
    assert (
        rows == [80 + decodes] * 2 + [80 + decodes // 2] * 2 + [80 + decodes // 4] * 2
    )
