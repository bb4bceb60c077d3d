# SPDX-License-Identifier: Apache-2.0
"""Drafting with asynchronous scheduling, in which nothing on the host knows what was
accepted. It loses nothing either.

As the default is on GPUs; the V1 model runner drafts with synchronous scheduling.
"""

import numpy as np
import pytest
from depth_routing import CACHES, POISON, model_runner
from early_exits import (
    VOCABULARY,
    assert_greedy,
    assert_others_go_on,
    assert_preempted,
    calibration,  # noqa: F401
    generate,
    options,
    random_prompts,
    start,
    surprise,
    watched,
)
from graph_replays import replaying
from scheduled_ahead import ahead, drafted_ahead, nothing_waits  # noqa: F401
from scoring import assert_scores, params, prompt, random_ids

from vllm.v1.spec_decode.early_exit_gate import STEPS_PER_TURN, _way_of
from vllm.v1.worker.depth.draft_gate import DROPPED_ROUNDS, TRIAL_ROUNDS, Way
from vllm.v1.worker.depth.draft_pass import DraftPass

FAMILIES = ("deep_llama", "deep_qwen3_moe", "deep_gemma3", "deep_opt")


@pytest.fixture
def llm(ahead):
    return start(ahead, options())


@pytest.fixture
def llama(oracle):
    return oracle("deep_llama")


def accepted(llm) -> int:
    values = {metric.name: metric for metric in llm.get_metrics()}
    return values["vllm:spec_decode_num_accepted_tokens"].value


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_models(ahead, oracle, family):
    """Prompts in chunks beside requests that decode, more of them than run at once."""
    llm = start(ahead, options(), family, disable_log_stats=False)
    prompts = random_prompts(14, VOCABULARY, 120)
    before = accepted(llm)
    with drafted_ahead(llm) as drafted:
        completions = generate(llm, prompts, params(12))
    for ids, completion in zip(prompts, completions):
        assert_greedy(oracle(family), ids, completion, 12)
    assert {len(tokens) for step in drafted for tokens in step} == {3}
    # Some drafts are accepted: a round gives more than one token. Some are not.
    assert 0 < accepted(llm) - before < 12 * 14 - len(drafted)


def test_drafts_are_those_of_synchronous_scheduling(engine, llm):
    """But at the end, of which that knows in time."""
    ids = random_ids(5, VOCABULARY, 40)
    with drafted_ahead(llm) as drafted:
        (completion,) = generate(llm, [ids], params(60))
    llm = start(engine, options())
    with watched(llm) as found:
        (expected,) = generate(llm, [ids], params(60))
    assert list(completion.token_ids) == list(expected.token_ids)
    drafts = [tokens for step in drafted for tokens in step]
    assert len(found.tokens) > 20
    assert drafts[: len(found.tokens)] == found.tokens


def test_nothing_waits_for_the_gpu(llm):
    """Which it would for a scalar, even one that is made of a number."""
    prompts = random_prompts(6, VOCABULARY, 90, seed=3)
    sampling = [params(9, temperature=float(n % 2)) for n in range(6)]
    with nothing_waits(), drafted_ahead(llm) as drafted:
        generate(llm, prompts, sampling)
    assert len(drafted) > 4


def test_graphs_of_passes(ahead, oracle):
    llm = start(ahead, options(), "deep_gemma3", disable_log_stats=False)
    prompts = random_prompts(12, VOCABULARY, 90, seed=11)
    with replaying(llm, 6) as replayed:
        completions = generate(llm, prompts, params(20))
    for ids, completion in zip(prompts, completions):
        assert_greedy(oracle("deep_gemma3"), ids, completion, 20)
    assert {*replayed} >= {4, 6}


def test_up_to_the_longest_sequence(ahead, llama):
    """Of some requests no drafts fit, and the others draft beside them."""
    llm = start(ahead, options(), max_model_len=64)
    prompts = [random_ids(n, VOCABULARY, 64 - 4 * n) for n in range(1, 12)]
    for ids, completion in zip(prompts, generate(llm, prompts, params(100))):
        assert_greedy(llama, ids, completion, 64 - len(ids))


@pytest.mark.parametrize("family", CACHES)
def test_slots_are_written_before_they_are_read(ahead, oracle, family):
    """In a cache that holds what no model writes, and beside prompts in chunks."""
    llm = start(ahead, options(), family)
    assert llm.reset_prefix_cache()
    for cache in model_runner(llm).kv_caches:
        cache.fill_(POISON)
    prompts = random_prompts(10, VOCABULARY, 140, seed=2)
    for ids, completion in zip(prompts, generate(llm, prompts, params(20))):
        assert_greedy(oracle(family), ids, completion, 20)


def test_what_is_cached_is_the_models(llm, llama):
    """Prompt and answer come again as a prompt, and are scored."""
    assert llm.reset_prefix_cache()
    ids = random_ids(3, VOCABULARY, 20)
    (completion,) = generate(llm, [ids], params(90))
    longer = ids + list(completion.token_ids) + random_ids(4, VOCABULARY, 10)
    (output,) = llm.generate([prompt(longer, longer[-8:])], params(), use_tqdm=False)
    assert output.num_cached_tokens >= 64
    assert_scores(output.target_logprobs, llama, longer, longer[-8:])


def test_preempted_requests(ahead, llama, monkeypatch):
    llm = start(ahead, options(), max_model_len=128, num_gpu_blocks_override=12)
    assert_preempted(llm, llama, 6, monkeypatch)


def test_aborted_and_new_requests_in_the_same_batches(llm, llama):
    assert_others_go_on(llm, llama)


def test_schedule_by_batch_size(ahead, llama):
    """Two requests draft three tokens, three draft one, and more decode plainly."""
    schedule = [[1, 2, 3], [3, 3, 1], [4, 256, 0]]
    llm = start(ahead, options(num_speculative_tokens_per_batch_size=schedule))
    prompts = random_prompts(6, VOCABULARY, 40, seed=6)
    with drafted_ahead(llm) as drafted:
        completions = generate(llm, prompts, [params(6 + 4 * n) for n in range(6)])
    for n, (ids, completion) in enumerate(zip(prompts, completions)):
        assert_greedy(llama, ids, completion, 6 + 4 * n)
    assert {len(tokens) for step in drafted for tokens in step} == {1, 3}


@pytest.mark.parametrize(
    "exit_layer, num_drafts, best",
    [(2, 2, Way()), (2, 2, Way(2, 2)), ([1, 2], 1, Way(1, 2))],
)
def test_a_gate_drafts_as_is_fastest(
    ahead, llama, exit_layer, num_drafts, best, monkeypatch
):
    """How many, and after which layers, by a clock of the test's, after a trial of each
    way, which takes turns of several steps. Tokens stay the model's."""
    speculative = options(exit_layer, num_drafts, draft_gate=True)
    llm = start(ahead, speculative, max_model_len=512)
    gate = llm.llm_engine.engine_core.engine_core.scheduler.draft_gate
    gate.sizes, gate.size, gate.last, gate.steps_left = {}, None, None, 0
    schedule, note = gate.schedule, gate.note
    chosen, time, drafting, ran = [], 0, Way(), []

    def scheduling(req_ids, *args) -> Way:
        found = schedule(req_ids, *args)
        if req_ids:
            chosen.append(found)
        return found

    def noting(scheduler_output, sampled) -> None:
        nonlocal drafting
        drafting = _way_of(scheduler_output)
        note(scheduler_output, sampled)

    def now() -> int:
        nonlocal time
        time += 1 if drafting == best else 9
        return time

    def running(first_layers, *args):
        ran.append(first_layers.exit_layer)
        return run(first_layers, *args)

    monkeypatch.setattr(gate, "schedule", scheduling)
    monkeypatch.setattr(gate, "note", noting)
    monkeypatch.setattr(gate, "_now", now)
    run = DraftPass.run
    monkeypatch.setattr(DraftPass, "run", running)
    ids = random_ids(best.num_drafts, VOCABULARY, 20)
    with drafted_ahead(llm) as drafted:
        (completion,) = generate(llm, [ids], params(400))
    assert_greedy(llama, ids, completion, 400)
    first, *chosen = chosen
    assert first == Way()  # a prompt's step is in no turn
    turns = 3 * -(-(DROPPED_ROUNDS + TRIAL_ROUNDS) // (STEPS_PER_TURN - 2))
    trial, after = chosen[: turns * STEPS_PER_TURN], chosen[turns * STEPS_PER_TURN :]
    firsts = trial[::STEPS_PER_TURN]
    assert trial == [way for way in firsts for _ in range(STEPS_PER_TURN)]
    exits = exit_layer if isinstance(exit_layer, list) else [exit_layer]
    drafting_ways = [Way(n, after) for after in exits for n in range(1, num_drafts + 1)]
    assert firsts == [Way(), *drafting_ways] * (turns // 3)
    assert {*after} == {best} and len(after) > 20
    # What was drafted is what was chosen.
    lens = [way.num_drafts for way in chosen]
    assert [len(tokens) for (tokens,) in drafted] == [n for n in lens if n]
    assert ran == [way.exit_layer for way in chosen for _ in range(way.num_drafts)]
    # And other batches, as time has it.
    prompts = random_prompts(9, VOCABULARY, 120)
    for ids, completion in zip(prompts, generate(llm, prompts, params(12))):
        assert_greedy(llama, ids, completion, 12)


def test_allowed_tokens(llm, llama):
    """Drafts that are not allowed are not accepted."""
    prompts = random_prompts(4, VOCABULARY, 30, seed=6)
    allowed = [5, 6, 7, 8, 9]
    pick = np.full(VOCABULARY, -np.inf)
    pick[allowed] = 0
    sampling = params(20, allowed_token_ids=allowed)
    for ids, completion in zip(prompts, generate(llm, prompts, sampling)):
        assert_greedy(llama, ids, completion, 20, pick)


def test_structured_output(llm, llama):
    """The scheduler asks for the drafts, and drops what the grammar forbids."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    answers = ("yes", "no", "nothing at all")
    sampling = SamplingParams(
        max_tokens=30,
        temperature=0,
        structured_outputs=StructuredOutputsParams(choice=[*answers]),
    )
    prompts = random_prompts(4, VOCABULARY, 30, seed=8)
    completions = generate(llm, prompts, [sampling, params(20)] * 2)
    # Bytes of the prompt that are no character can come before.
    assert all(completion.text.endswith(answers) for completion in completions[::2])
    for ids, completion in [*zip(prompts, completions)][1::2]:
        assert_greedy(llama, ids, completion, 20)


def test_drawn_tokens_are_the_models(ahead, llama):
    """How probable they are, all together, and that a seed draws them again."""
    # Drafts of five of six layers are accepted often enough for a wrong one to show.
    llm = start(ahead, options(5, 2), disable_log_stats=False)
    ids, before = random_ids(40, VOCABULARY, 12), accepted(llm)
    answers = generate(llm, [ids] * 120, params(5, temperature=0.7))
    assert accepted(llm) - before > 60
    tokens = np.array([answer.token_ids for answer in answers])
    assert surprise(llama, ids, tokens, 0.7) > 1e-4
    sampling = [params(40, temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    first, second, other = (generate(llm, [ids], each)[0] for each in sampling)
    assert list(first.token_ids) == list(second.token_ids) != list(other.token_ids)


def test_no_noise_is_drawn_twice(ahead, llama, monkeypatch):
    """Not even where drafts do not fit any more, some of which are verified all the same:
    a token that was chosen by it would follow itself too often."""
    from vllm.v1.worker.gpu.spec_decode import early_exit

    llm = start(ahead, options(5, 8), max_model_len=40)
    draw, firsts = early_exit.gumbel_sample, []

    def watching(logits, slots, temperature, seeds, positions, **others):
        if int(others["logits_cache_col"]) == 0:
            firsts.extend(positions.tolist())
        return draw(logits, slots, temperature, seeds, positions, **others)

    monkeypatch.setattr(early_exit, "gumbel_sample", watching)
    ids = random_ids(41, VOCABULARY, 20)
    (completion,) = generate(llm, [ids], params(20, temperature=0.7))
    assert len(completion.token_ids) == 20
    assert firsts[0] == 20 and firsts[-1] > 40 - 8
    assert firsts == sorted(set(firsts))


@pytest.mark.parametrize(
    "named, others",
    [
        ("a min_acceptance that is not 0", dict(min_acceptance=0.5)),
        ("a min_acceptance that is not 0", {}),  # its default with probes
        ("prompt_lookup_max", dict(min_acceptance=0, prompt_lookup_max=3)),
    ],
)
def test_what_waits_is_refused_by_name(engine, runner, calibration, named, others):
    named = named if runner == "v2" else "the V1 model runner"
    message = f"not compatible with the speculative method 'early_exit' and {named}"
    speculative = options(calibration=calibration, **others)
    with pytest.raises(ValueError, match=message):
        start(engine, speculative, async_scheduling=True)
