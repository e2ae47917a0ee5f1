"""`Rounds`: outer steps with those learners that have arrived.

z: the outer parameters; x[m]: the parameters of learner m after s[m] steps of t[m] examples. A round is over
when the quorum is there and the grace after it has passed, or when nobody is left to wait for:

    who has brought nothing to the round before      is not: what is stopped takes the others the grace once
    who has brought what it began a round earlier    is: it trains again, and with the grace of some rounds
                                                     comes to be in step with the others

    w[m] <- t[m]^2 / s[m]                    or 1, with weights="equal"
    z    <- OuterOptimizer(z, sum of w[m] (z - x[m]) / sum of w[m])

Source: Decoupled DiLoCo (arXiv 2604.21428).
"""

from collections.abc import Sequence, Set
from fractions import Fraction
from typing import NamedTuple

import torch

from mpisgd.methods.diloco.outer import OuterOptimizer
from mpisgd.methods.strategy.flat_copy import FlatCopy

__all__ = ["Contribution", "Rounds", "Rule"]


class Rule(NamedTuple):
    """When a round is over, and what each counts in it.

    Attributes:
        quorum: learners that an outer step needs.
        grace_s: seconds after that, for the others.
        by_examples: whether weights depend on examples and steps.
    """

    quorum: int
    grace_s: float
    by_examples: bool


class Contribution(NamedTuple):
    """What a learner brings.

    Attributes:
        learner: who.
        steps: that it took.
        examples: that these were of; steps where nobody has said how many.
        is_counted: whether somebody has.
        is_late: whether it began from older outer parameters, and trains again by now.
        copy: its parameters and buffers; overwritten when the round is over.
    """

    learner: int
    steps: int
    examples: int
    is_counted: bool
    is_late: bool
    copy: FlatCopy


class Rounds:
    """The outer parameters, and what has arrived since the last outer step.

    Args:
        rule: see there.
        keys: of the parameters.
        newest: the outer parameters, in the order of the keys, and the buffers.
        outer: the optimizer of the former.

    Attributes:
        newest: as given.
        outer: as given.
        version: how many outer steps there were.
        pending: what has arrived since, in the order of arrival.
        missing: who had nothing in the last outer step.
    """

    def __init__(self, rule: Rule, keys: Sequence[str], newest: FlatCopy, outer: OuterOptimizer) -> None:
        self._rule, self._keys = rule, keys
        self.newest, self.outer = newest, outer
        self.version = 0
        self.pending: list[Contribution] = []
        self._there_since_s: float | None = None
        self._training: Set[int] = frozenset()
        self.missing: Set[int] = frozenset()

    def is_over(self, training: Set[int], now_s: float) -> bool:
        """Return whether an outer step is due.

        Args:
            training: the learners that may still come.
            now_s: the time.
        """
        arrived = {each.learner for each in self.pending}
        waiting = {each.learner for each in self.pending if not each.is_late}
        if not arrived or len(arrived) < min(self._rule.quorum, len(arrived | training)):
            return False
        if training and not waiting:
            return False
        if self._there_since_s is None:
            self._there_since_s = now_s
        self._training = training
        return training - self.missing <= waiting or now_s - self._there_since_s >= self._rule.grace_s

    @property
    def is_mixed(self) -> bool:
        """Whether examples were counted by some of those that have arrived, and not by others."""
        return self._rule.by_examples and len({each.is_counted for each in self.pending}) > 1

    def step(self) -> tuple[int, ...]:
        """Take an outer step with what has arrived; return whose it was."""
        arrived = sorted(self.pending, key=lambda each: each.learner)  # those of one in their order
        count = len(self._keys)
        for each, share in zip(arrived, self._shares(arrived), strict=True):
            for outer, param in zip(self.newest.tensors[:count], each.copy.tensors, strict=False):
                torch.sub(outer, param, out=param)
            if share != 1:
                each.copy.scale_(share)
        first, *others = (each.copy for each in arrived)
        first.become_mean(others)
        self.outer.step(dict(zip(self._keys, first.tensors[:count], strict=True)))
        for buffer, mean in zip(self.newest.tensors[count:], first.tensors[count:], strict=True):
            buffer.copy_(mean)
        self.missing = self._training - {each.learner for each in arrived}
        self.version, self.pending, self._there_since_s = self.version + 1, [], None
        return tuple(each.learner for each in arrived)

    def _shares(self, arrived: Sequence[Contribution]) -> list[float]:
        """Return what each is multiplied by, so that the mean is the weighted one; 1 for equal weights."""
        if not self._rule.by_examples:
            return [1.0] * len(arrived)
        weights = [Fraction(each.examples**2, each.steps) for each in arrived]
        return [float(len(arrived) * weight / sum(weights)) for weight in weights]
