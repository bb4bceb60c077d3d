# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/icm`: the search against brute force, and its prompts."""

import itertools
import math
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "applications" / "icm"
sys.path.insert(0, str(FOLDER))

import icm
from prompts import RECENT, in_one_order, leave_one_out
from search import Consistency, Example, Parameters, Search

# The search


def coupled(couplings: np.ndarray, field: np.ndarray):
    """A model of two labels whose log-odds are linear in the other labels."""

    def evaluate(labellings):
        tables = []
        for labels in labellings:
            signs = np.zeros(len(field))
            for i, label in labels.items():
                signs[i] = 2 * label - 1
            odds = field + couplings @ signs  # the diagonal is 0: leave-one-out
            tables.append(
                np.stack([-np.logaddexp(0, odds), -np.logaddexp(0, -odds)], 1)
            )
        return tables

    return evaluate


def brute_force(couplings, field, pairs, alpha) -> float:
    """The largest objective over all labellings, from its definition."""
    best = -math.inf
    for signs in itertools.product((-1, 1), repeat=len(field)):
        total = 0.0
        for i, sign in enumerate(signs):
            odds = field[i] + sum(couplings[i][j] * signs[j] for j in range(len(signs)))
            total -= math.log1p(math.exp(-sign * odds))
        wrong = sum(signs[i] == signs[j] for i, j in pairs)
        best = max(best, alpha * total / len(field) - wrong)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_brute_force_finds(seed):
    rng = np.random.default_rng(seed)
    count = 8
    # A hidden labelling that the examples support each other in, through noise. (The
    # search proposes what the model says, so it finds coherent labellings only.)
    hidden = np.array([1, -1, -1, 1, *rng.choice([-1, 1], count - 4)])
    couplings = np.outer(hidden, hidden) * rng.uniform(0.1, 0.6, (count, count))
    couplings = (couplings + couplings.T) / 2
    np.fill_diagonal(couplings, 0)
    field = rng.normal(size=count) * 0.3
    pairs = [(0, 1), (2, 3)]
    examples = [
        Example(str(n), group=str(n // 2) if n < 4 else "") for n in range(count)
    ]
    parameters = Parameters(alpha=8, seeds=4)
    best = -math.inf
    for start in range(6):  # a random search: several starts
        search = Search(
            examples,
            Consistency(examples, "opposite"),
            2,
            coupled(couplings, field),
            parameters,
        )
        state = search.start(start)
        for _ in range(150):
            state = search.step(state)
            step = state.history[-1]
            if step.labelled == count:
                best = max(best, step.objective)
    assert best == pytest.approx(brute_force(couplings, field, pairs, 8))


def test_objective():
    examples = [Example(str(n), group="g") for n in range(3)]
    search = Search(
        examples, Consistency(examples, "same"), 2, None, Parameters(alpha=3)
    )
    scores = np.log([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
    mean = (math.log(0.5) + math.log(0.8)) / 2
    assert search.objective({0: 0, 1: 1}, scores) == pytest.approx(3 * mean - 1)


@pytest.mark.parametrize(
    ("rule", "keys", "forbidden"),
    [
        ("same", "xy", {(0, 1), (1, 0)}),
        ("opposite", "xy", {(0, 0), (1, 1)}),
        ("claims", "xy", {(1, 1)}),
        ("claims", "xx", {(0, 1), (1, 0)}),
        ("none", "xx", set()),
    ],
)
def test_consistency(rule, keys, forbidden):
    examples = [Example("", group="g", key=key) for key in keys]
    consistency = Consistency(examples, rule)
    found = {
        pair
        for pair in itertools.product((0, 1), repeat=2)
        if consistency.pairs(dict(enumerate(pair)))
    }
    assert found == forbidden
    assert not consistency.pairs({0: 1})


def test_temperature():
    parameters = Parameters()
    assert parameters.temperature(1) == 10
    assert parameters.temperature(100) == pytest.approx(10 / (1 + 0.99 * math.log(100)))
    assert Parameters(final_temperature=2).temperature(10**6) == 2


@pytest.mark.parametrize("temperature", [1e-9, 0.5, 1e9])
def test_a_worse_labelling_is_taken_as_often_as_the_temperature_says(temperature):
    """Example 0 is proposed as 1, which makes example 1 less likely: U falls."""
    examples = [Example("a"), Example("b")]
    before = np.log([[0.4, 0.6], [0.9, 0.1]])
    after = np.log([[0.4, 0.6], [0.5, 0.5]])

    def evaluate(labellings):
        return [after if labels[0] else before for labels in labellings]

    parameters = Parameters(
        alpha=2, initial_temperature=temperature, final_temperature=1e-9
    )
    consistency = Consistency(examples, "none")
    search = Search(examples, consistency, 2, evaluate, parameters)
    begin = {0: 0, 1: 0}
    gain = search.objective({0: 1, 1: 0}, after) - search.objective(begin, before)
    assert gain < 0
    steps = []
    for seed in range(600):
        state = search.start(seed)
        state = icm.State(begin, before, 0, state.random_state)
        steps.append(search.step(state).history[-1])
    proposed = [step for step in steps if step.proposed]
    assert {step.example for step in proposed} == {0}
    share = sum(step.accepted for step in proposed) / len(proposed)
    expected = math.exp(gain / temperature)
    deviation = math.sqrt(expected * (1 - expected) / len(proposed))
    assert abs(share - expected) <= 4 * deviation


def test_a_fix_takes_the_likeliest_consistent_labels():
    examples = [Example("a", group="g"), Example("b", group="g"), Example("c")]
    table = np.log([[0.6, 0.4], [0.1, 0.9], [0.5, 0.5]])
    calls = []

    def evaluate(labellings):
        calls.append(labellings)
        return [table] * len(labellings)

    consistency = Consistency(examples, "same")
    search = Search(examples, consistency, 2, evaluate, Parameters(alpha=1))
    labels, _ = search.fix({0: 0, 1: 1, 2: 0}, random.Random(0))
    assert labels == {0: 1, 1: 1, 2: 0}
    assert len(calls) == 1  # the choices go with the labelling itself


def test_unlabelled_ones_of_a_group_with_labels_are_drawn_first():
    examples = [Example("", group=str(n // 2)) for n in range(100)]
    search = Search(examples, Consistency(examples, "same"), 2, None, Parameters())
    rng = random.Random(0)
    drawn = Counter(search.draw({0: 0}, rng) for _ in range(1000))
    # Weight 100 of 199; four standard deviations of the count are 63.
    assert abs(drawn[1] - 1000 * 100 / 199) < 63


# The order of demonstrations


@pytest.mark.parametrize("count", [*range(20), 64, 100])
def test_each_prompt_leaves_out_one_and_holds_all_others(count):
    order = random.Random(count).sample(range(1000), count)
    prompts = dict(leave_one_out(order))
    assert set(prompts) == set(order)
    for left_out, others in prompts.items():
        assert sorted([*others, left_out]) == sorted(order)


def places(prompts) -> set[tuple]:
    """What a perfect prefix cache would have to compute: the different prefixes."""
    return {others[:n] for others in prompts for n in range(1, len(others) + 1)}


@pytest.mark.parametrize("count", [64, 128, 256])
def test_prompts_share_all_but_a_logarithm(count):
    order = tuple(range(count))
    new = places(others for _, others in leave_one_out(order))
    assert len(new) == count * math.log2(count)
    usual = places(others for _, others in in_one_order(order))
    assert len(usual) > count * (count - 1) / 2


def test_a_further_demonstration_costs_one_a_prompt():
    count = 128 + RECENT - 2
    old = places(others for _, others in leave_one_out(range(count)))
    new = places(others for _, others in leave_one_out(range(count + 1)))
    assert len(new - old) <= count + 1 + RECENT
