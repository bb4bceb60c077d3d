# SPDX-License-Identifier: Apache-2.0
"""Routing decided at the cutoffs: the chosen tokens leave, and every logit is right."""

import numpy as np
import pytest
import torch
from depth_cutoffs import (
    ABOUT,
    SHARES,
    Recorded,
    engine_options,
    requests,
    routed,  # noqa: F401
    save_probes,
)
from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    TOLERANCE,
    assert_logits,
    logits_options,
    poison_cache,
    serve,
)
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM

FAMILIES = [family for family in CONFIGS if family.startswith("deep_")]


def chosen(calls) -> dict[str, list[int]]:
    """Depths of the tokens of each step that was routed, by request."""
    depths: dict[str, list[int]] = {}
    at, running = NUM_LAYERS, []
    for cutoff, scores in [*calls, (0, {})]:
        if cutoff <= at:  # the next step
            for name in running:
                depths.setdefault(name, []).append(NUM_LAYERS)
            running = sorted(scores, key=scores.get)
            ends = np.round(np.cumsum((0, *SHARES)) * len(running)).astype(int)
            leaving = dict(zip(CUTOFFS, np.diff(ends)))
        at = cutoff
        assert set(scores) == set(running), "others than those that were to go on"
        running = sorted(scores, key=scores.get)
        for name in running[: leaving.get(cutoff, 0)]:
            depths.setdefault(name, []).append(cutoff)
        running = running[leaving.get(cutoff, 0) :]
    return depths


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_the_oracle(engine, depth_oracle, routed, family):
    llm = engine(family, **engine_options())
    poison_cache(llm)
    served = routed(llm, requests())
    assert_logits(depth_oracle(family), served)
    assert {depth for r in served for depth in r.depths} == set(CUTOFFS)


def test_the_lowest_scores_leave(engine, depth_oracle, routed):
    """All decode at once, so every step is routed."""
    llm = engine("deep_llama", **engine_options(max_num_batched_tokens=256))
    asked = requests(8)
    for request in asked:
        request.arrival, request.max_tokens = 0, 6
        request.prompt = request.prompt[:20]
    served = routed(llm, asked)
    expected = chosen(Recorded.calls)
    for request in served:
        assert request.depths == expected[request.output.request_id]
        mean = request.output.outputs[0].mean_decode_depth
        assert mean == pytest.approx(np.mean(request.depths))
    assert_logits(depth_oracle("deep_llama"), served)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_every_batch_size(engine, depth_oracle, routed, batch):
    llm = engine("deep_llama", **engine_options())
    served = routed(llm, requests(batch))
    assert_logits(depth_oracle("deep_llama"), served)


def test_ceilings(engine, depth_oracle, routed):
    llm = engine("deep_llama", **engine_options())
    asked = requests()
    ceilings = [None, NUM_LAYERS, 2, 4, None, NUM_LAYERS, 2, 4, None, None]
    for request, ceiling in zip(asked, ceilings):
        if ceiling is not None:
            request.options = dict(max_depth=ceiling)
    served = routed(llm, asked)
    assert_logits(depth_oracle("deep_llama"), served)
    for request, ceiling in zip(served, ceilings):
        if ceiling in (2, NUM_LAYERS):
            assert set(request.depths) == {ceiling}
        elif ceiling == 4:
            assert set(request.depths) <= {2, 4}


def test_preemption(engine, depth_oracle, routed):
    llm = engine("deep_llama", **engine_options())
    served = routed(llm, requests(), interrupt_at=6)
    assert any(request.preempted for request in served)
    assert_logits(depth_oracle("deep_llama"), served)


def test_full_depth_afterwards(engine, routed):
    """What was routed leaves nothing behind."""
    llm = engine("deep_llama", **engine_options())
    routed(llm, requests())
    assert llm.reset_prefix_cache()
    after = serve(llm, requests(max_depth=NUM_LAYERS))
    plain = engine("deep_llama", **logits_options())
    assert plain.reset_prefix_cache()
    for one, other in zip(after, serve(plain, requests())):
        assert abs(one.logits - other.logits).max() <= TOLERANCE


# Probes


def test_probes_read_the_states_of_their_cutoffs(engine, model_folder, tmp_path):
    """The one decode token of each request leaves where Transformers' hidden states
    say it does."""
    config = CONFIGS["deep_llama"]
    file = save_probes(tmp_path, config.hidden_size)
    options = engine_options(max_num_batched_tokens=256, utio_calibration=file)
    llm = engine(
        "deep_llama", **{k: v for k, v in options.items() if "policy" not in k}
    )
    asked = requests(8)
    for request in asked:
        request.arrival, request.max_tokens = 0, 2
        request.prompt = request.prompt[:20]
    serve(llm, asked)

    probes = load_file(file)
    model = AutoModelForCausalLM.from_pretrained(model_folder("deep_llama")).float()
    scores = []  # [requests, cutoffs]
    for request in asked:
        ids = torch.tensor([[*request.prompt, request.tokens[0]]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        at_cutoffs = torch.stack([states[c][0, -1] for c in CUTOFFS[:-1]])
        unit = at_cutoffs / at_cutoffs.square().mean(1, keepdim=True).sqrt()
        inner = torch.einsum("cwh,ch->cw", probes["probe_weight_1"], unit)
        inner = torch.nn.functional.gelu(inner + probes["probe_bias_1"])
        score = (inner * probes["probe_weight_2"]).sum(1) + probes["probe_bias_2"]
        scores.append(score)
    scores = torch.stack(scores).numpy()
    expected = np.full(8, NUM_LAYERS)
    for index, (cutoff, leaving) in enumerate(zip(CUTOFFS, (3, 2))):
        running = np.flatnonzero(expected == NUM_LAYERS)
        expected[running[np.argsort(scores[running, index])[:leaving]]] = cutoff
    depths = [request.output.outputs[0].mean_decode_depth for request in asked]
    assert depths == expected.tolist()


@pytest.fixture(scope="module")
def translators(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("translators")
    return save_probes(folder, CONFIGS["deep_llama"].hidden_size, translators=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_translated_exits_agree_with_the_oracle(
    engine, depth_oracle, routed, translators, family
):
    """In routing by scores, under ceilings, and in the keys that are left behind,
    which are those of the states as they were."""
    llm = engine(family, **engine_options(utio_calibration=translators))
    poison_cache(llm)
    asked = requests()
    asked[4].options = dict(max_depth=2)
    served = routed(llm, asked)
    assert_logits(depth_oracle(family, calibration=translators), served)
    assert {depth for r in served for depth in r.depths} == set(CUTOFFS)
    plain = depth_oracle(family)
    request = next(r for r in served if set(r.depths) & set(CUTOFFS[:-1]))
    untranslated = plain.logits(request.prompt, request.tokens, request.depths)
    assert abs(untranslated - request.logits).max() > 0.1


def test_refusals(engine, tmp_path):
    """A calibration of another model, or none; weights of a score that nothing reads."""
    hidden_size = CONFIGS["deep_llama"].hidden_size

    def start(**options) -> None:
        engine("deep_llama", **engine_options(**options))

    with pytest.raises(ValueError, match="utio_score_weights .* no effect"):
        start(utio_score_weights=(1.0, 0.0, 0.0))
    for message, size, cutoffs, about in (
        ("states of", hidden_size + 1, CUTOFFS[:-1], {}),
        ("cutoffs", hidden_size, (2, 5), {}),
        ("12 layers", hidden_size, CUTOFFS[:-1], {"num_layers": "12"}),
        ("its format", hidden_size, CUTOFFS[:-1], {"format": "other"}),
    ):
        file = save_probes(tmp_path, size, cutoffs, **about)
        with pytest.raises(ValueError, match=message):
            start(utio_calibration=file)
    with pytest.raises(ValueError, match="utio_calibration"):
        start(utio_calibration=str(tmp_path / "missing"))
    file = save_probes(tmp_path, hidden_size, translators=True)
    tensors = load_file(file)
    about = dict(zip(("format", "cutoffs", "num_layers"), ABOUT))
    for name, changed in (
        ("translator_bias", None),
        ("translator_bias", tensors["translator_bias"][:, 1:].contiguous()),
        ("translator_weight", tensors["translator_weight"][:, 1:].contiguous()),
        ("translator_weight", tensors["translator_weight"][:1].contiguous()),
        ("translator_weight_2", None),
        ("translator_bias_1", tensors["translator_bias_1"][:, 1:].contiguous()),
    ):
        others = tensors | {name: changed}
        if changed is None:
            del others[name]
        save_file(others, file, about)
        with pytest.raises(ValueError, match="utio_calibration .*translator|cannot"):
            start(utio_calibration=file)
