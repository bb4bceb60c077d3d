# SPDX-License-Identifier: Apache-2.0
"""The depth oracle itself, against Transformers' own forward."""

import numpy as np
import pytest
from depth_oracle import DepthOracle
from depth_routing import CUTOFFS, NUM_LAYERS, TOLERANCE
from scoring import random_ids
from tiny_models import CONFIGS

FAMILIES = [family for family in CONFIGS if family.startswith("deep_")]
PROMPT = random_ids(0, CONFIGS["deep_llama"].vocab_size, 60)
GENERATED = random_ids(1, CONFIGS["deep_llama"].vocab_size, 12)
MIXED = [2, 4, 6, 2, 2, 6, 4, 4, 6, 2, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_at_full_depth_it_is_transformers_forward(family, oracle, depth_oracle):
    logits = depth_oracle(family).logits(PROMPT, GENERATED, [NUM_LAYERS] * 11)
    whole = oracle(family).logits(PROMPT + GENERATED)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(logits, whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_depth_shows_at_its_token_and_later_ones(family, depth_oracle):
    logits = depth_oracle(family).logits(PROMPT, GENERATED, MIXED)
    for step in (2, 5, 8):
        for depth in set(CUTOFFS) - {MIXED[step]}:
            depths = [*MIXED[:step], depth, *MIXED[step + 1 :]]
            other = depth_oracle(family).logits(PROMPT, GENERATED, depths)
            change = abs(other - logits).max(axis=1)
            assert (change[: step + 1] == 0).all()
            assert change[step + 1] > 100 * TOLERANCE
            # Later tokens attend to it in the layers that one of the two runs had
            # it leave; one that leaves earlier itself does not see those.
            deep = [i + 1 for i in range(step + 1, 11) if MIXED[i] == NUM_LAYERS]
            assert (change[deep] > 10 * TOLERANCE).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_propagation_deeper_tokens_differ(family, depth_oracle):
    logits = depth_oracle(family).logits(PROMPT, GENERATED, MIXED)
    other = depth_oracle(family, propagate=False).logits(PROMPT, GENERATED, MIXED)
    change = abs(other - logits).max(axis=1)
    assert (change[:2] == 0).all()  # of the first token that left, and before
    assert change[[i + 1 for i in range(11) if MIXED[i] == NUM_LAYERS]].min() > (
        10 * TOLERANCE
    )


def test_the_tokens_of_one_depth_are_a_model_of_that_depth(model_folder):
    """With every token at depth d, prompt aside, layers after d change nothing that
    is seen: the same logits come of a model whose later layers have other weights."""
    one = DepthOracle(model_folder("deep_llama"))
    other = DepthOracle(model_folder("deep_llama"))
    for layer in other._layers[2:]:
        for parameter in layer.parameters():
            parameter.data.mul_(0.5)
    logits = [o.logits(PROMPT, GENERATED, [2] * 11) for o in (one, other)]
    np.testing.assert_array_equal(logits[0][1:], logits[1][1:])
    assert abs(logits[0][0] - logits[1][0]).max() > 0.1
