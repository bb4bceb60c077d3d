# SPDX-License-Identifier: Apache-2.0
"""Requests that score their own prompt read the prefix cache where its scores are kept."""

import os
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from adapters import RANK
from oracle import Oracle, log_softmax
from safetensors.torch import load_file, save_file
from scoring import LOGIT_ERROR, params, prompt, random_ids, run, score
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
BLOCK = 32  # the smallest that attention on a CPU takes
TOLERANCE = 4 * LOGIT_ERROR
REQUESTS = {
    runner: int(os.environ.get("SCORE_CACHE_REQUESTS", default))
    for runner, default in (("v1", 120), ("v2", 60))
}
"""Of the random histories; `SCORE_CACHE_REQUESTS=2500` takes three minutes each on V1, and
half an hour on V2."""


@pytest.fixture
def llm(engine):
    llm = engine("llama", block_size=BLOCK)
    assert llm.reset_prefix_cache()
    return llm


def counters(llm) -> tuple[float, float]:
    """Tokens whose scores were asked for, and those that were kept, since the start."""
    totals = {metric.name: metric for metric in llm.get_metrics()}
    return tuple(
        totals[f"vllm:score_cache_{name}"].value for name in ("queries", "hits")
    )


def assert_prompt_logprobs(output, logits: np.ndarray, ids: list[int], k: int) -> None:
    """Asserts that not a row is missing, and that each says what the oracle says.

    Args:
        logits: float64 `[len(ids), vocabulary]`, row p after token p.
    """
    entries = output.prompt_logprobs
    assert len(entries) == len(ids) and entries[0] is None
    expected = log_softmax(logits)
    for position, entry in enumerate(entries[1:], start=1):
        row = expected[position - 1]
        token = ids[position]
        assert next(iter(entry)) == token
        # Of logits that are nearly equal, either may be the first.
        top = [*entry] if len(entry) == k else [*entry][1:]
        best = np.sort(row)[::-1][:k]
        np.testing.assert_allclose(np.sort(row[top])[::-1], best, atol=TOLERANCE)
        for other, value in entry.items():
            assert abs(value.logprob - row[other]) < TOLERANCE
        near = np.abs(row - row[token]) < TOLERANCE
        least = 1 + (row > row[token]).sum() - near.sum()
        assert least <= entry[token].rank <= least + 2 * near.sum()


@pytest.mark.parametrize("k", [0, 1])
def test_the_same_prompt_again(llm, oracle, k):
    ids = random_ids(1, VOCABULARY, 6 * BLOCK + 5)
    sampling = params(1, prompt_logprobs=k)
    (first,) = run(llm, [prompt(ids)], sampling)
    (second,) = run(llm, [prompt(ids)], sampling)
    assert first.num_cached_tokens == 0
    # The token after the hit is scored at the state before it.
    assert second.num_cached_tokens == 5 * BLOCK
    anew = params(1, prompt_logprobs=k, skip_reading_prefix_cache=True)
    (third,) = run(llm, [prompt(ids)], anew)
    assert third.num_cached_tokens == 0
    for output in (first, second, third):
        assert_prompt_logprobs(output, oracle("llama").logits(ids), ids, k)


@pytest.mark.parametrize("length", [5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
def test_another_ending(llm, oracle, length):
    """Blocks that are shared are read, and the rows of the others are computed."""
    ids = random_ids(2, VOCABULARY, 6 * BLOCK)
    other = ids[:length] + random_ids(3, VOCABULARY, 40)
    run(llm, [prompt(ids)], params(1, prompt_logprobs=1))
    (output,) = run(llm, [prompt(other)], params(1, prompt_logprobs=1))
    assert output.num_cached_tokens == (length // BLOCK - 1) * BLOCK
    assert_prompt_logprobs(output, oracle("llama").logits(other), other, 1)


def test_blocks_without_scores_are_computed_again(llm, oracle):
    ids = random_ids(4, VOCABULARY, 6 * BLOCK)
    run(llm, [prompt(ids)], params(1))  # computed, and not scored
    (output,) = run(llm, [prompt(ids)], params(1, prompt_logprobs=0))
    assert output.num_cached_tokens == 0
    assert_prompt_logprobs(output, oracle("llama").logits(ids), ids, 0)
    # Kept without the most probable token of each row.
    (output,) = run(llm, [prompt(ids)], params(1, prompt_logprobs=1))
    assert output.num_cached_tokens == 0
    (output,) = run(llm, [prompt(ids)], params(1, prompt_logprobs=0))
    assert output.num_cached_tokens == 5 * BLOCK
    assert_prompt_logprobs(output, oracle("llama").logits(ids), ids, 0)


def test_more_of_the_most_probable_tokens_than_are_kept(llm, oracle):
    ids = random_ids(5, VOCABULARY, 4 * BLOCK)
    for _ in range(2):
        (output,) = run(llm, [prompt(ids)], params(1, prompt_logprobs=3))
        assert output.num_cached_tokens == 0
        assert_prompt_logprobs(output, oracle("llama").logits(ids), ids, 3)


def test_a_wider_score_cache(engine, oracle):
    llm = engine("llama", block_size=BLOCK, score_cache_top_k=5)
    ids = random_ids(5, VOCABULARY, 4 * BLOCK + 1)
    for k, cached in ((5, 0), (5, 3 * BLOCK), (2, 3 * BLOCK), (6, 0)):
        (output,) = run(llm, [prompt(ids)], params(1, prompt_logprobs=k))
        assert output.num_cached_tokens == cached
        assert_prompt_logprobs(output, oracle("llama").logits(ids), ids, k)


@pytest.mark.parametrize("rows", [1, BLOCK, BLOCK + 7, 5 * BLOCK, 6 * BLOCK + 2])
def test_named_tokens_that_are_the_prompts(llm, rows):
    ids = random_ids(6, VOCABULARY, 6 * BLOCK + 3)
    whole = score(llm, ids, ids[1:])
    for _ in range(2):
        (output,) = run(llm, [prompt(ids, ids[-rows:])], params())
        scores = output.target_logprobs
        # Less than a block needs no scores but its own.
        assert output.num_cached_tokens == (6 if rows == 1 else 5) * BLOCK
        assert scores.start == len(ids) - rows
        for name in ("logprobs", "ranks", "entropy"):
            expected = getattr(whole, name)[-rows:]
            np.testing.assert_allclose(getattr(scores, name), expected, atol=TOLERANCE)


def test_the_first_named_token_lies_within_a_block(llm, oracle):
    """What is kept of that block begins there, and serves who names no token before."""
    ids = random_ids(16, VOCABULARY, 6 * BLOCK + 3)
    longer = ids + random_ids(17, VOCABULARY, BLOCK)
    start = 2 * BLOCK + 5
    for tokens, first, cached in (
        (ids, start, 0),
        (ids, start, 5 * BLOCK),
        (longer, start, 5 * BLOCK),
        (ids, start + 3, 5 * BLOCK),
        (ids, start - 1, 2 * BLOCK),
    ):
        (output,) = run(llm, [prompt(tokens, tokens[first:])], params())
        assert output.num_cached_tokens == cached
        expected = oracle("llama").scores(tokens, tokens[first:])
        scores = output.target_logprobs
        np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=TOLERANCE)


def test_what_the_engine_generates_is_nobodys_prompt(llm, oracle):
    """A request that only scores runs all but its last token, and samples another one
    in its place: the block that this fills is not the prompt's."""
    ids = random_ids(7, VOCABULARY, 3 * BLOCK)
    (output,) = run(llm, [prompt(ids, ids[1:])], params())
    (sampled,) = run(llm, [prompt(ids[:-1])], params(1))
    other = [*ids[:-1], *sampled.outputs[0].token_ids] + random_ids(8, VOCABULARY, 40)
    assert other[len(ids) - 1] != ids[-1]
    for _ in range(2):
        scores = score(llm, other, other[1:])
        expected = oracle("llama").scores(other, other[1:])
        np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize(
    "change",
    [
        {"target_temperature": 2.0},
        {"target_top_k": 1},
        {"target_token_ids": None, "target_top_k": 1},
    ],
)
def test_scores_of_another_kind_are_computed(llm, change):
    ids = random_ids(9, VOCABULARY, 4 * BLOCK)
    request = prompt(ids, ids[1:]) | change
    score(llm, ids, ids[1:])
    alone, again = (run(llm, [request], params())[0] for _ in range(2))
    assert again.num_cached_tokens == 0
    np.testing.assert_allclose(
        again.target_logprobs.entropy, alone.target_logprobs.entropy, atol=TOLERANCE
    )


def test_other_salts_and_resets_share_nothing(llm):
    ids = random_ids(10, VOCABULARY, 4 * BLOCK + 1)
    sampling = params(1, prompt_logprobs=1)

    def cached(salt: str | None = None) -> int:
        request = prompt(ids)
        if salt is not None:
            request["cache_salt"] = salt
        return run(llm, [request], sampling)[0].num_cached_tokens

    assert [cached(), cached("a"), cached("b"), cached("a")] == [0, 0, 0, 3 * BLOCK]
    assert llm.reset_prefix_cache()
    assert [cached("a"), cached("a")] == [0, 3 * BLOCK]
    # What runs in the workers may change the weights, so that nothing is known of what
    # the prefix cache holds until it is reset.
    llm.collective_rpc("check_health")
    assert [cached("a"), cached("a")] == [0, 0]
    assert llm.reset_prefix_cache()
    llm.collective_rpc("check_health")  # while it holds nothing
    assert repr(llm)
    assert [cached("a"), cached("a")] == [0, 3 * BLOCK]


def flip(model) -> None:
    """Changes what the second layer's keys and values are made of; twice, not at all."""
    model.model.layers[0].post_attention_layernorm.weight.data.neg_()


def logprobs_of(llm, ids: list[int], adapter=None) -> np.ndarray:
    """The log-probabilities that `prompt_logprobs` gives the prompt's tokens."""
    sampling = params(1, prompt_logprobs=0)
    outputs = llm.generate([prompt(ids)], sampling, lora_request=adapter, use_tqdm=False)
    entries = outputs[0].prompt_logprobs[1:]
    return np.array([entry[token].logprob for token, entry in zip(ids[1:], entries)])


def test_weights_that_change(llm):
    """By whoever asks first, and by who asks for more, the prefix cache still holding what
    the old weights made."""
    ids = random_ids(12, VOCABULARY, 5 * BLOCK)
    before = logprobs_of(llm, ids)
    llm.apply_model(flip)
    found = [logprobs_of(llm, ids[:n]) for n in (4 * BLOCK, 5 * BLOCK)]
    assert llm.reset_prefix_cache()
    expected = logprobs_of(llm, ids)
    llm.apply_model(flip)
    assert llm.reset_prefix_cache()
    assert np.abs(expected - before).max() > 0.1
    for logprobs in found:
        np.testing.assert_allclose(
            logprobs, expected[: len(logprobs)], atol=TOLERANCE
        )
    np.testing.assert_allclose(logprobs_of(llm, ids), before, atol=TOLERANCE)


def test_without_it(engine, oracle):
    llm = engine("llama", block_size=BLOCK, enable_score_cache=False)
    ids = random_ids(11, VOCABULARY, 3 * BLOCK)
    for _ in range(2):
        (output,) = run(llm, [prompt(ids)], params(1, prompt_logprobs=1))
        assert output.num_cached_tokens == 0
        assert_prompt_logprobs(output, oracle("llama").logits(ids), ids, 1)


LORA = dict(
    block_size=BLOCK,
    num_gpu_blocks_override=32,
    enable_lora=True,
    max_lora_rank=RANK,
    disable_log_stats=False,
)


CHANGES = ["in place", "then in place", "again", "under another id"]


@pytest.mark.parametrize("how", CHANGES)
def test_adapters_that_change(engine, adapter_folders, tmp_path, how):
    """Under their old name, the prefix cache holding what they made before."""
    from vllm.lora.request import LoRARequest

    llm = engine("llama", max_num_batched_tokens=1024, **LORA)
    path = tmp_path / "adapter"
    shutil.copytree(adapter_folders[0], path)
    ids = random_ids(13, VOCABULARY, 5 * BLOCK)
    number = 10 * (1 + CHANGES.index(how))
    name = f"changes {how}"
    first = LoRARequest(name, number, str(path), load_inplace=how == "in place")
    before = logprobs_of(llm, ids, first)
    file = path / "adapter_model.safetensors"
    save_file({key: 2 * tensor for key, tensor in load_file(file).items()}, file)
    second = first
    if how == "then in place":
        second = LoRARequest(name, number, str(path), load_inplace=True)
    elif how == "again":
        llm.llm_engine.remove_lora(number)
    elif how == "under another id":
        llm.llm_engine.remove_lora(number)
        second = LoRARequest(name, number + 1, str(path))
        llm.llm_engine.add_lora(second)
    found = [logprobs_of(llm, ids[:n], second) for n in (4 * BLOCK, 5 * BLOCK)]
    expected = logprobs_of(llm, ids, LoRARequest(f"other {how}", number + 2, str(path)))
    assert np.abs(expected - before).max() > 0.1
    for logprobs in found:
        np.testing.assert_allclose(
            logprobs, expected[: len(logprobs)], atol=TOLERANCE
        )


@dataclass
class Prompt:
    ids: list[int]
    logits: tuple[np.ndarray, np.ndarray]  # without and with the adapter


@pytest.mark.parametrize("budget", [1024, 48], ids=["whole", "chunked"])
def test_random_histories(engine, adapter_folders, runner, budget):
    """Prompts that share prefixes, in a cache that holds a few of them: evictions,
    preemptions, adapters, salts, resets. Each row is the oracle's; none is missing."""
    from vllm.lora.request import LoRARequest

    adapter, merged = adapter_folders
    llm = engine("llama", max_num_batched_tokens=budget, **LORA)
    oracles = (Oracle(llm.model_config.model), Oracle(merged))
    rng = np.random.default_rng(budget)
    stems = [random_ids(100 + i, VOCABULARY, 200) for i in range(3)]
    prompts = []
    for i in range(40):
        stem = stems[rng.integers(3)]
        ids = stem[: rng.integers(2, 200)]
        ids = ids + random_ids(200 + i, VOCABULARY, int(rng.integers(0, 40)))
        prompts.append(Prompt(ids, tuple(oracle.logits(ids) for oracle in oracles)))
    asked, known = counters(llm)
    done = 0
    while done < REQUESTS[runner]:
        batch = []
        for _ in range(min(int(rng.integers(1, 9)), REQUESTS[runner] - done)):
            chosen = prompts[rng.integers(len(prompts))]
            request = prompt(chosen.ids)
            if rng.random() < 0.2:
                request["cache_salt"] = "other"
            k = int(rng.integers(-1, 3))
            if k < 0:
                rows = int(rng.integers(1, len(chosen.ids)))
                request["target_token_ids"] = chosen.ids[-rows:]
            batch.append((chosen, request, k, int(rng.random() < 0.25)))
        outputs = llm.generate(
            [request for _, request, _, _ in batch],
            [
                # Those that go on while others start are preempted now and then.
                params(int(rng.integers(40)))
                if k < 0
                else params(int(rng.integers(1, 40)), prompt_logprobs=k)
                for _, _, k, _ in batch
            ],
            lora_request=[
                LoRARequest("a", 1, str(adapter)) if lora else None
                for _, _, _, lora in batch
            ],
            use_tqdm=False,
        )
        for (chosen, request, k, lora), output in zip(batch, outputs):
            logits, ids = chosen.logits[lora], chosen.ids
            if k >= 0:
                assert_prompt_logprobs(output, logits, ids, k)
                continue
            scores = output.target_logprobs
            rows = len(request["target_token_ids"])
            expected = log_softmax(logits)[np.arange(-rows - 1, -1), ids[-rows:]]
            np.testing.assert_allclose(scores.logprobs[:, 0], expected, atol=TOLERANCE)
        done += len(batch)
        if rng.random() < 0.02:
            llm.reset_prefix_cache()
    queries, hits = (now - then for now, then in zip(counters(llm), (asked, known)))
    print(f"\n{done} requests, {hits:,.0f} of {queries:,.0f} rows from the score cache")
    assert 0.03 < hits / queries < 0.9
