# SPDX-License-Identifier: Apache-2.0
"""Internal Coherence Maximization: the search, without any input or output.

Wen et al., "Unsupervised Elicitation of Language Models", arXiv:2506.10139. Sought are
labels y of all examples x that maximize

    U(D) = alpha * P(D) - I(D)

P, the mutual predictability, is the mean over the labelled examples of
log p(y_i | x_i, all the others with their labels); I counts the pairs of labels that
contradict each other. The paper writes P as a sum, which any further label makes
smaller; the mean is what its authors' program computes.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

Labels = dict[int, int]
"""Example to label, of the labelled ones, in the order in which they were labelled."""
Rule = Literal["none", "same", "opposite", "claims"]


class Example(NamedTuple):
    text: str  # ends where the label begins
    truth: int | None = None  # for the report only; the search never reads it
    group: str = ""  # only examples of one group can contradict each other
    key: str = ""  # what the claim says, for the rule "claims"


@dataclass(frozen=True)
class Parameters:
    """Of the search; the defaults are the paper's."""

    alpha: float = 50.0
    initial_temperature: float = 10.0
    final_temperature: float = 0.01
    cooling: float = 0.99  # beta: T = T0 / (1 + beta * log(n))
    seeds: int = 8  # examples that get a random label at the start
    fix_rounds: int = 10
    group_weight: float = 100.0  # of drawing an example whose group has labels

    def temperature(self, iteration: int) -> float:
        """The temperature at an iteration, counted from 1."""
        cooled = self.initial_temperature / (1 + self.cooling * math.log(iteration))
        return max(self.final_temperature, cooled)


class Step(NamedTuple):
    """What one iteration did."""

    iteration: int
    example: int
    proposed: bool  # the model disagrees with the label
    accepted: bool
    objective: float
    inconsistent: int
    labelled: int
    agreement: float | None  # with the truth, of the labelled ones


@dataclass(frozen=True)
class State:
    """All that the next iteration depends on."""

    labels: Labels
    scores: np.ndarray  # [examples, labels], log-probabilities in their context
    iteration: int
    random_state: tuple
    history: tuple[Step, ...] = field(default=(), repr=False)


Evaluate = Callable[[list[Labels]], list[np.ndarray]]
"""Scores of all examples, [examples, labels] each, in the context of each labelling."""


class Consistency:
    """Which pairs of labels contradict each other.

    Args:
        rule: "same": the examples of a group have one label. "opposite": two examples
            of a group (A is better, B is better) have different ones. "claims":
            labels are false (0) and true (1); claims of one group and key are equally
            true, and of one group with different keys not both true.
    """

    def __init__(self, examples: Sequence[Example], rule: Rule):
        self.examples = examples
        self.rule = rule
        groups: dict[str, list[int]] = {}
        for index, example in enumerate(examples):
            if rule != "none" and example.group:
                groups.setdefault(example.group, []).append(index)
        self.groups = groups

    def group(self, index: int) -> list[int]:
        return self.groups.get(self.examples[index].group, [index])

    def contradict(self, i: int, j: int, label_i: int, label_j: int) -> bool:
        if self.rule == "same":
            return label_i != label_j
        if self.rule == "opposite":
            return label_i == label_j
        if self.examples[i].key == self.examples[j].key:
            return label_i != label_j
        return label_i == label_j == 1

    def pairs(self, labels: Labels) -> list[tuple[int, int]]:
        """The pairs that contradict each other."""
        return [
            (i, j)
            for members in self.groups.values()
            for i, j in itertools.combinations([m for m in members if m in labels], 2)
            if self.contradict(i, j, labels[i], labels[j])
        ]


def normalize(logprobs: np.ndarray) -> np.ndarray:
    """Log-probabilities among the labels alone; [..., labels]."""
    return logprobs - np.logaddexp.reduce(logprobs, axis=-1, keepdims=True)


class Search:
    """The simulated annealing.

    Args:
        evaluate: asks the model. Called at most once an iteration, unless a fix needs
            more than one round.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        consistency: Consistency,
        label_count: int,
        evaluate: Evaluate,
        parameters: Parameters,
    ):
        self.examples = examples
        self.label_count = label_count
        self.consistency = consistency
        self.evaluate = evaluate
        self.parameters = parameters

    def objective(self, labels: Labels, scores: np.ndarray) -> float:
        """U of a labelling and its scores (nats times alpha, minus pairs)."""
        chosen = [scores[i, label] for i, label in labels.items()]
        inconsistent = len(self.consistency.pairs(labels))
        return self.parameters.alpha * float(np.mean(chosen)) - inconsistent

    def start(self, seed: int) -> State:
        """Labels the first examples at random, the labels in equal numbers."""
        rng = random.Random(seed)
        count = min(self.parameters.seeds, len(self.examples))
        drawn = [n % self.label_count for n in range(count)]
        rng.shuffle(drawn)
        labels, scores = self.fix(dict(enumerate(drawn)), rng)
        return State(labels, scores, 0, rng.getstate())

    def step(self, state: State) -> State:
        """One iteration. The state that is passed in stays as it is."""
        rng = random.Random()
        rng.setstate(state.random_state)
        iteration = state.iteration + 1
        labels, scores = state.labels, state.scores
        chosen = self.draw(labels, rng)
        label = int(scores[chosen].argmax())
        proposed = label != labels.get(chosen)
        accepted = False
        if proposed:
            changed, changed_scores = self.fix({**labels, chosen: label}, rng)
            gain = self.objective(changed, changed_scores)
            gain -= self.objective(labels, scores)
            temperature = self.parameters.temperature(iteration)
            accepted = gain > 0 or rng.random() < math.exp(gain / temperature)
            if accepted:
                labels, scores = changed, changed_scores
        step = Step(
            iteration,
            chosen,
            proposed,
            accepted,
            self.objective(labels, scores),
            len(self.consistency.pairs(labels)),
            len(labels),
            agreement(labels, self.examples),
        )
        return replace(
            state,
            labels=labels,
            scores=scores,
            iteration=iteration,
            random_state=rng.getstate(),
            history=(*state.history, step),
        )

    def draw(self, labels: Labels, rng: random.Random) -> int:
        """An example; unlabelled ones in a group with labels are likelier."""
        weights = [1.0] * len(self.examples)
        for members in self.consistency.groups.values():
            if any(i in labels for i in members):
                for i in members:
                    if i not in labels:
                        weights[i] = self.parameters.group_weight
        return rng.choices(range(len(weights)), weights)[0]

    def fix(self, labels: Labels, rng: random.Random) -> tuple[Labels, np.ndarray]:
        """Mends contradictions: draws a pair, and takes the consistent labels of the
        two that make the objective largest, if they make it larger.

        The labelling itself and the choices of the first pair are scored together.
        """
        scores = None
        tried: set[tuple[int, int]] = set()
        for _ in range(self.parameters.fix_rounds):
            pairs = [p for p in self.consistency.pairs(labels) if p not in tried]
            if scores is not None and not pairs:
                break
            choices = []
            if pairs:
                pair = rng.choice(pairs)
                tried.add(pair)
                choices = self.consistent_choices(labels, *pair)
            if scores is None:
                scores, *others = self.evaluate([labels, *choices])
            else:
                others = self.evaluate(choices)
            best = self.objective(labels, scores)
            for choice, its_scores in zip(choices, others, strict=True):
                objective = self.objective(choice, its_scores)
                if objective > best:
                    best, labels, scores = objective, choice, its_scores
                    tried.clear()
        if scores is None:  # no rounds
            (scores,) = self.evaluate([labels])
        return labels, scores

    def consistent_choices(self, labels: Labels, i: int, j: int) -> list[Labels]:
        """The labellings in which i and j do not contradict each other."""
        return [
            {**labels, i: label_i, j: label_j}
            for label_i, label_j in itertools.product(range(self.label_count), repeat=2)
            if not self.consistency.contradict(i, j, label_i, label_j)
        ]


def agreement(labels: Labels, examples: Sequence[Example]) -> float | None:
    """Share of the labelled examples whose label is the true one; None where no truth
    is known."""
    right = [
        label == examples[i].truth
        for i, label in labels.items()
        if examples[i].truth is not None
    ]
    return sum(right) / len(right) if right else None
