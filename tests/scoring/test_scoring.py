# SPDX-License-Identifier: Apache-2.0
"""What a scoring request returns (DESIGN section 5), against Hugging Face float32."""

import numpy as np
import pytest
from oracle import NOT_SCORED, log_softmax, ranks_of
from scoring import (
    FLOAT32_TOLERANCE,
    assert_ranks,
    assert_same_scores,
    assert_scores,
    assert_well_formed,
    params,
    prompt,
    random_ids,
    run,
    score,
)
from tiny_models import CONFIGS, TWINS
from vllm.v1.engine import EngineCoreRequest

LENGTHS = (2, 3, 31, 64, 200)
VOCABULARY = CONFIGS["llama"].vocab_size
PROMPT = random_ids(1, VOCABULARY, 40)


@pytest.mark.parametrize("family", CONFIGS)
def test_teacher_forcing(engine, oracle, family):
    vocabulary = CONFIGS[family].vocab_size
    prompts = [random_ids(n, vocabulary, n) for n in LENGTHS]
    outputs = run(engine(family), [prompt(p, p[1:]) for p in prompts], params())
    for ids, output in zip(prompts, outputs):
        assert_scores(output.target_logprobs, oracle(family), ids, ids[1:])


@pytest.mark.parametrize("rows", [1, 2, 17, len(PROMPT) - 1])
def test_rows_are_aligned_to_the_end(llm, llama, rows):
    targets = random_ids(rows, VOCABULARY, rows, 3)
    assert_scores(score(llm, PROMPT, targets), llama, PROMPT, targets)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([7, 8, 9], id="one-a-row"),
        pytest.param([[7], [8], [9]], id="lists-of-one"),
        pytest.param([[7, 1], [8, 2], [9, 3]], id="several-a-row"),
        pytest.param([[7, 1, 5], [8], [9, 3]], id="ragged"),
        pytest.param(np.array([[7, 1], [8, 2]], dtype=np.int32), id="int32"),
        pytest.param(np.array([[7, 1], [8, 2]], dtype=np.int64), id="int64"),
        pytest.param(np.array([[7, 1], [8, 2]], dtype=np.uint16), id="uint16"),
        pytest.param(np.array([[7, 1], [8, 2], [3, 4]])[::2, ::-1], id="strided"),
        pytest.param(np.array([[7, 1], [8, 2]], order="F"), id="column-major"),
    ],
)
def test_accepted_forms(llm, llama, targets):
    assert_scores(score(llm, PROMPT, targets), llama, PROMPT, targets)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([7, -1, 9, -1], id="some-rows"),
        pytest.param([-1, -1, -1], id="every-row"),
        pytest.param([[7, -1], [-1, 8], [-1, -1], [5, 6]], id="anywhere-in-a-row"),
        pytest.param([[-1], [7, 8, -1], [-1, -1, 9]], id="ragged"),
    ],
)
def test_minus_one_is_not_scored(llm, llama, targets):
    assert_scores(score(llm, PROMPT, targets), llama, PROMPT, targets)


@pytest.mark.parametrize("candidates", [1, 2, 7, 8, 9, 20])
def test_candidates_up_to_max_logprobs(llm, llama, candidates):
    targets = np.array(random_ids(candidates, VOCABULARY, 30, candidates))
    holes = np.random.default_rng(candidates).random(targets.shape) < 0.2
    targets[holes] = NOT_SCORED
    assert_scores(score(llm, PROMPT, targets), llama, PROMPT, targets)


def test_repeated_ids_in_a_row_score_alike(llm, llama):
    targets = [[5, 5, 6, 5]] * 4
    scores = score(llm, PROMPT, targets)
    assert_scores(scores, llama, PROMPT, targets)
    np.testing.assert_array_equal(scores.logprobs[:, 0], scores.logprobs[:, 1])
    np.testing.assert_array_equal(scores.ranks[:, 0], scores.ranks[:, 3])


@pytest.mark.parametrize("family", CONFIGS)
def test_ids_at_the_edges_of_the_vocabulary(engine, oracle, family):
    ids = random_ids(2, CONFIGS[family].vocab_size, 20)
    targets = [[0, CONFIGS[family].vocab_size - 1]] * 19
    assert_scores(score(engine(family), ids, targets), oracle(family), ids, targets)


def test_equal_logits_share_a_rank(llm, llama):
    targets = [[*TWINS, 5, 6, 7]] * (len(PROMPT) - 1)
    scores = score(llm, PROMPT, targets)
    assert_scores(scores, llama, PROMPT, targets)
    np.testing.assert_array_equal(scores.ranks[:, 0], scores.ranks[:, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_of_the_whole_vocabulary_are_exact(engine, dtype):
    """With every logit returned, the ranks follow from the answer alone. In bfloat16
    many logits are equal, so this tells "greater" from "greater or equal"."""
    llm = engine("llama", dtype=dtype, max_logprobs=-1, logprobs_mode="raw_logits")
    targets = np.tile(np.arange(VOCABULARY), (12, 1))
    scores = score(llm, PROMPT, targets)
    assert_well_formed(scores, PROMPT, targets)
    np.testing.assert_array_equal(scores.ranks, ranks_of(scores.logprobs, targets))
    ties = VOCABULARY - len(np.unique(scores.logprobs[0]))
    assert ties >= (1 if dtype == "float32" else 100)


@pytest.mark.parametrize(
    "mode", ["raw_logits", "processed_logits", "processed_logprobs"]
)
def test_logprobs_mode_changes_the_values_alone(engine, llm, llama, mode):
    targets = random_ids(3, VOCABULARY, 20, 2)
    expected = llama.scores(PROMPT, targets)
    logits = np.take_along_axis(expected.logits, expected.ids, axis=1)
    values = logits if mode.endswith("logits") else expected.logprobs
    scores = score(engine("llama", logprobs_mode=mode), PROMPT, targets)
    assert_well_formed(scores, PROMPT, targets)
    np.testing.assert_allclose(scores.logprobs, values, rtol=0, atol=FLOAT32_TOLERANCE)
    assert_ranks(scores.ranks, expected)
    np.testing.assert_allclose(
        scores.entropy, expected.entropy, rtol=0, atol=FLOAT32_TOLERANCE
    )


def test_a_large_vocabulary_is_scored_in_pieces(engine, oracle):
    """Four requests of 230 rows in one step, at 40,001 words: 147 MB of logits, of which
    at most 32 MiB exist at once."""
    vocabulary = CONFIGS["wide"].vocab_size
    prompts = [random_ids(n, vocabulary, 231) for n in range(4)]
    targets = [
        random_ids(9 + n, vocabulary, 230, k) for n, k in enumerate((1, 3, 9, 2))
    ]
    requests = [prompt(p, t) for p, t in zip(prompts, targets)]
    for p, t, output in zip(prompts, targets, run(engine("wide"), requests, params())):
        assert_scores(output.target_logprobs, oracle("wide"), p, t)


@pytest.mark.parametrize("budget", [16, 33])
def test_chunked_prefill_gives_the_same_scores(engine, llm, llama, budget):
    chunked = engine("llama", max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [random_ids(n, VOCABULARY, n) for n in (16, 17, 33, 34, 100, 200)]
    rows = (15, 1, 30, 33, 60, 199)
    targets = [random_ids(n, VOCABULARY, n, 2) for n in rows]
    requests = [prompt(p, t) for p, t in zip(prompts, targets)]
    for p, t, output in zip(prompts, targets, run(chunked, requests, params())):
        assert_scores(output.target_logprobs, llama, p, t)


def test_a_seeds_tokens_do_not_depend_on_the_chunks(engine, llm, llama):
    """What unfinished prefills sample is discarded, and draws nothing."""
    chunked = engine("llama", max_num_batched_tokens=33, max_num_seqs=4)
    prompts = [random_ids(n, VOCABULARY, n) for n in (20, 90, 200)]
    requests = [prompt(p, p[-9:]) for p in prompts]
    sampling = params(6, temperature=1.0, seed=7)
    for p, ours, whole in zip(
        prompts, run(chunked, requests, sampling), run(llm, requests, sampling)
    ):
        assert ours.outputs[0].token_ids == whole.outputs[0].token_ids
        assert_scores(ours.target_logprobs, llama, p, p[-9:])


def test_repeating_a_prompt_repeats_its_scores(llm, llama):
    """The second and third time, the prefix cache holds the whole prompt."""
    ids = random_ids(5, VOCABULARY, 200)
    for targets in (ids[1:], ids[1:], [3, 4, 5]):
        assert_scores(score(llm, ids, targets), llama, ids, targets)


def test_max_tokens_0_generates_nothing(llm, llama):
    (output,) = run(llm, [prompt(PROMPT, PROMPT[1:])], params(0))
    assert output.finished
    (completion,) = output.outputs
    assert list(completion.token_ids) == []
    assert completion.text == ""
    assert completion.finish_reason == "length"
    assert_scores(output.target_logprobs, llama, PROMPT, PROMPT[1:])


@pytest.mark.parametrize("budget", [1024, 40])
def test_a_prompt_may_fill_the_context(engine, llama, budget):
    """If nothing is to be generated; the last token has no place in the cache then."""
    from vllm.exceptions import VLLMValidationError

    llm = engine("llama", max_num_batched_tokens=budget)
    ids = random_ids(3, VOCABULARY, 256)
    short = random_ids(4, VOCABULARY, 2)
    requests = [prompt(ids, ids[1:]), prompt(ids, [[5, 9]]), prompt(short, short[1:])]
    sampling = params(0, n=2, temperature=1.0)
    for _ in range(2):
        for request, output in zip(requests, run(llm, requests, sampling)):
            targets = request["target_token_ids"]
            assert list(output.prompt_token_ids) == request["prompt_token_ids"]
            assert [list(one.token_ids) for one in output.outputs] == [[], []]
            assert_scores(
                output.target_logprobs, llama, request["prompt_token_ids"], targets
            )
    for request, sampling in [
        (prompt(ids, ids[1:]), params(1)),
        (prompt([*ids, 5], ids), params(0)),
    ]:
        with pytest.raises(VLLMValidationError, match="256"):
            run(llm, [request], sampling)
    (output,) = run(llm, [prompt(ids[:-1], ids[1:-1])], params(1))
    assert len(output.outputs[0].token_ids) == 1
    assert_scores(output.target_logprobs, llama, ids[:-1], ids[1:-1])


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("seed", [None, 7])
def test_n_sequences_come_with_the_scores(llm, llama, max_tokens, seed):
    sampling = params(max_tokens, n=3, temperature=1.0, seed=seed, prompt_logprobs=0)
    (output,) = run(llm, [prompt(PROMPT, PROMPT[1:])], sampling)
    assert [len(one.token_ids) for one in output.outputs] == [max_tokens] * 3
    assert_scores(output.target_logprobs, llama, PROMPT, PROMPT[1:])
    named = [row and [*row] for row in output.prompt_logprobs]
    assert named == [None, *([token] for token in PROMPT[1:])]
    assert 0 <= output.num_cached_tokens < len(PROMPT)


def test_n_sequences_are_scored_once(llm, monkeypatch):
    """Counts the rows of logits that are scored."""
    from vllm.v1.worker import target_logprobs

    rows = []
    score_targets = target_logprobs.score_targets
    monkeypatch.setattr(
        target_logprobs,
        "score_targets",
        lambda logits, *args: rows.append(len(logits)) or score_targets(logits, *args),
    )
    sampling = params(2, n=4, temperature=1.0)
    run(llm, [prompt(PROMPT, PROMPT[1:])], sampling)
    assert sum(rows) == len(PROMPT) - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scoring_does_not_change_what_is_generated(llm, temperature):
    sampling = params(6, temperature=temperature, seed=11, logprobs=2)
    plain, scored = run(
        llm, [prompt(PROMPT), prompt(PROMPT, PROMPT[1:])], [sampling, sampling.clone()]
    )
    assert plain.target_logprobs is None
    assert scored.outputs[0].token_ids == plain.outputs[0].token_ids
    assert scored.outputs[0].text == plain.outputs[0].text
    assert [set(step) for step in scored.outputs[0].logprobs] == [
        set(step) for step in plain.outputs[0].logprobs
    ]


def test_detokenize_false(llm, llama):
    (output,) = run(
        llm,
        [prompt(PROMPT, PROMPT[1:])],
        params(2, detokenize=False, prompt_logprobs=0),
    )
    assert output.outputs[0].text == ""
    assert_scores(output.target_logprobs, llama, PROMPT, PROMPT[1:])
    assert output.prompt_logprobs[-1][PROMPT[-1]].decoded_token is None


def test_without_a_tokenizer(engine, llama):
    llm = engine("llama", skip_tokenizer_init=True)
    scores = score(llm, PROMPT, PROMPT[1:], detokenize=False)
    assert_scores(scores, llama, PROMPT, PROMPT[1:])


def test_prompt_logprobs_hold_the_named_tokens(llm, llama):
    """Upstream's format: a dict a position, `None` where nothing was scored."""
    targets = [[5, 9], [6, -1], [-1, -1], [9, 9]]
    (output,) = run(llm, [prompt(PROMPT, targets)], params(prompt_logprobs=1))
    scores = output.target_logprobs
    assert_scores(scores, llama, PROMPT, targets)
    assert len(output.prompt_logprobs) == len(PROMPT)
    start = scores.start
    assert all(entry is None for entry in output.prompt_logprobs[:start])
    for row, ids in enumerate(targets):
        entry = output.prompt_logprobs[start + row]
        assert set(entry or {}) == set(ids) - {NOT_SCORED}
        for column, token in enumerate(ids):
            if token != NOT_SCORED:
                assert entry[token].logprob == scores.logprobs[row, column]
                assert entry[token].rank == scores.ranks[row, column]


@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs_of_teacher_forcing_match_the_ordinary_ones(llm, flat):
    """`X = P[1:]` with `prompt_logprobs=0` gives what upstream gives without `X`."""
    scored, plain = run(
        llm,
        [prompt(PROMPT, PROMPT[1:]), prompt(PROMPT)],
        params(max_tokens=1, prompt_logprobs=0, flat_logprobs=flat),
    )
    assert type(scored.prompt_logprobs) is type(plain.prompt_logprobs)
    if flat:
        names = ("start_indices", "end_indices", "token_ids", "ranks")
        for name in (*names, "decoded_tokens"):
            ours, upstreams = (
                getattr(o.prompt_logprobs, name) for o in (scored, plain)
            )
            assert ours == upstreams, name
        return
    assert scored.prompt_logprobs[0] is None and plain.prompt_logprobs[0] is None
    for ours, upstreams in zip(scored.prompt_logprobs[1:], plain.prompt_logprobs[1:]):
        assert list(ours) == list(upstreams)
        (ours,), (upstreams,) = ours.values(), upstreams.values()
        assert ours.decoded_token == upstreams.decoded_token
        assert ours.logprob == pytest.approx(upstreams.logprob, abs=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_beside_prompt_logprob_token_ids_are_whole(llm, max_tokens):
    """Without tokens to generate the last token is run for them as well."""
    sampling = params(
        max_tokens,
        prompt_logprobs=0,
        prompt_logprob_token_ids=[[token] for token in PROMPT[1:]],
    )
    (output,) = run(llm, [prompt(PROMPT)], sampling)
    assert len(output.prompt_logprobs) == len(PROMPT)
    values = output.target_logprobs.logprobs[:, 0]
    for token, entry, value in zip(PROMPT[1:], output.prompt_logprobs[1:], values):
        assert entry[token].logprob == pytest.approx(value, abs=FLOAT32_TOLERANCE)
    assert len(output.outputs[0].token_ids) == max_tokens


@pytest.mark.parametrize("rows", [1, 12, len(PROMPT) - 1])
def test_prompt_logprob_token_ids_gives_the_same_numbers(llm, rows):
    """Upstream's name for it: rows from `prompt_logprob_start`, which counts the
    positions that predict, one before those that are predicted."""
    targets = random_ids(rows, VOCABULARY, rows, 3)
    ours, upstreams = run(
        llm,
        [prompt(PROMPT, targets), prompt(PROMPT)],
        [
            params(max_tokens=1),
            params(
                max_tokens=1,
                prompt_logprob_token_ids=targets,
                prompt_logprob_start=len(PROMPT) - 1 - rows,
            ),
        ],
    )
    assert_same_scores(ours.target_logprobs, upstreams.target_logprobs)
    np.testing.assert_array_equal(
        upstreams.prompt_token_id_logprobs, ours.target_logprobs.logprobs
    )


def test_requests_of_the_rust_frontend(llm, llama):
    """They reach the engine as they are, without an input processor, and it reads no
    output later than upstream's `prompt_token_id_logprobs`."""
    targets = random_ids(5, VOCABULARY, 12, 3)
    core = llm.llm_engine.engine_core
    core.add_request(
        EngineCoreRequest(
            request_id="rust",
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=params(
                max_tokens=1,
                prompt_logprob_token_ids=np.array(targets, dtype=np.int32),
                prompt_logprob_start=len(PROMPT) - 1 - len(targets),
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    outputs = []
    while not (outputs and outputs[-1].finished):
        outputs += core.get_output().outputs
    (output,) = outputs
    assert output.target_logprobs is None
    scores = score(llm, PROMPT, targets)
    assert_scores(scores, llama, PROMPT, targets)
    np.testing.assert_allclose(
        output.prompt_token_id_logprobs, scores.logprobs, atol=FLOAT32_TOLERANCE
    )


def test_the_callers_objects_stay_as_they_are(llm, llama):
    targets = [[5, 6], [7]]
    request, sampling = prompt(list(PROMPT), targets), params(prompt_logprobs=0)
    for _ in range(2):
        (output,) = run(llm, [request], sampling)
        assert_scores(output.target_logprobs, llama, PROMPT, targets)
    assert request == {"prompt_token_ids": PROMPT, "target_token_ids": [[5, 6], [7]]}
    assert sampling.prompt_logprob_token_ids is None
    assert sampling.prompt_logprobs == 0


def bf16_tolerance(logits: np.ndarray, layers: int) -> float:
    """Most that a bfloat16 log-probability is expected to be off, in nats.

    A bfloat16 has 8 significant bits, so one rounding has a relative error of at most
    u = 2^-8, spread evenly: u / sqrt(3) in the root mean square. A token's state goes
    through about 12 roundings a layer (two norms; q/k/v, rotation, attention, output;
    gate, up, activation, down; two residual sums), and independent ones add up as
    their root: the final state is off by u / sqrt(3) * sqrt(12 * layers) of its size.
    A logit is a sum of many such terms, so it is off by that share of the logits' own
    deviation, normally distributed. A log-probability is the difference of a logit and
    the log-sum-exp, which is a mean of such errors: at most as much again. Six
    deviations are not met in a million values, and eight leave room for roundings that
    are not quite independent. The logit itself is rounded once more.
    """
    u = 2.0**-8
    states = u / np.sqrt(3) * np.sqrt(12 * layers)
    return 2 * 8 * states * logits.std() + u * np.abs(logits).max()


@pytest.mark.parametrize("family", [name for name in CONFIGS if "moe" not in name])
def test_bfloat16_is_within_its_bound(engine, oracle, family):
    """Against float32 arithmetic on the same weights, rounded to bfloat16.

    Not of a mixture of experts: rounding can choose another expert, which no bound of
    rounding errors covers.
    """
    import torch

    exact = oracle(family, weights=torch.bfloat16)
    ids = random_ids(8, CONFIGS[family].vocab_size, 100)
    targets = random_ids(9, CONFIGS[family].vocab_size, 99, 8)
    scores = score(engine(family, dtype="bfloat16"), ids, targets)
    assert_well_formed(scores, ids, targets)
    expected = exact.scores(ids, targets)
    errors = np.abs(scores.logprobs - expected.logprobs)
    bound = bf16_tolerance(expected.logits, CONFIGS[family].num_hidden_layers)
    assert errors.max() <= bound
    # Sixteen deviations make the bound; the mean error is about one and a half.
    assert errors.mean() <= bound / 8
    entropies = np.abs(scores.entropy - expected.entropy)
    assert entropies.max() <= bound


def test_the_oracles_own_arithmetic():
    """One row worked out by hand."""
    logits = np.array([[0.0, 2.0, 2.0, -1.0]])
    total = sum(np.exp(x) for x in logits[0])
    np.testing.assert_allclose(log_softmax(logits)[0], logits[0] - np.log(total))
    ids = np.array([[1, 2, 0, 3, -1]])
    np.testing.assert_array_equal(ranks_of(logits, ids), [[1, 1, 3, 4, 0]])
