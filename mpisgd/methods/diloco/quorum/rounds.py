"""`Rounds`: outer steps with those learners that have arrived, and how long a late one trains for the next.

z: the outer parameters; z[m]: those from which learner m began; x[m]: its parameters after s[m] steps, which
were of t[m] examples:

    d[m] <- z[m] - x[m]
    w[m] <- t[m]^2 / s[m]                    or 1, with weights="equal"
    z    <- OuterOptimizer(z, sum of w[m] d[m] / sum of w[m])

A round is the time from one outer step to the next. It ends when all have arrived who are waited for, or the
grace after the quorum has passed. A learner that has not arrived by then is behind:

    from then on                          it is not waited for: a stop takes the others the grace once
    when it is told of the outer step     it brings what it has, to which its change of the round now is added
    for the rest of that round            it trains as long as those that began in time, and is waited for

It goes on by the clock until it has taken all its steps within a round. So a learner that is slower for good
takes fewer steps than the others, and arrives when they do. What comes late is no reason for an outer step:
it waits for a change from the newest outer parameters, and stays out where there is none before the end.

Sources: Decoupled DiLoCo (arXiv 2604.21428); the numbers of steps by speed: Liu et al. 2024, "Asynchronous
Local-SGD Training for Language Modeling".
"""

import statistics
from collections.abc import Sequence, Set
from fractions import Fraction
from typing import NamedTuple

import torch

from mpisgd.methods.diloco.outer import OuterOptimizer
from mpisgd.methods.diloco.quorum.messages import Said
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
    """What a learner has brought to the round that is open, all of it together.

    Attributes:
        learner: who.
        steps: that it took.
        examples: that these were of; steps where nobody has said how many.
        is_counted: whether somebody has.
        is_late: whether all of it began in an earlier round, and the learner trains again by now.
        changes: of its parameters, and its latest buffers as they are; overwritten when the round is over.
    """

    learner: int
    steps: int
    examples: int
    is_counted: bool
    is_late: bool
    changes: FlatCopy


class Rounds:
    """The outer parameters, what has arrived since they last changed, and where each learner is.

    Args:
        rule: see there.
        keys: of the parameters, which come before the buffers in a copy.
        newest: the outer parameters and buffers.
        outer: steps along changes of them.
        size: number of learners.

    Attributes:
        newest: as given.
        outer: as given.
        published: a copy of `newest`, which is never written to.
        version: how many outer steps there were.
        pending: what has arrived since the last one.
        missing: who had no part in that in time, and has not come since.
        based: the version from which each learner began; without those that are lost.
        bases: the outer parameters of earlier versions from which some learner began.
    """

    def __init__(
        self, rule: Rule, keys: Sequence[str], newest: FlatCopy, outer: OuterOptimizer, size: int
    ) -> None:
        self._rule, self._keys = rule, list(keys)
        self.newest, self.outer = newest, outer
        self.version = 0
        self.pending: list[Contribution] = []
        self.missing: set[int] = set()
        self.based: dict[int, int] = dict.fromkeys(range(size), 0)
        self.bases: dict[int, FlatCopy] = {}
        self.publish()
        self._there_since_s: float | None = None
        self._training: Set[int] = frozenset()
        self._opened_s = 0.0  # when the round began
        self._full_s: list[float] = []  # how long those of this round have trained that took all their steps
        self._round_s: float | None = None  # how long such a learner trains; None: that is not known
        self._by_clock: set[int] = set()  # learners

    def publish(self) -> None:
        """Copy `newest`, which has changed."""
        self.published = self.newest.new_like()
        self.published.copy_(self.newest)

    # -- learners -----------------------------------------------------------------------------------

    def knows(self, version: int) -> bool:
        """Return whether a learner may have begun from outer parameters of this version."""
        return version == self.version or version in self.bases

    def enter(self, learner: int, said: Said, copy: FlatCopy) -> bool:
        """Note parameters that a learner has brought; return whether it is late.

        Args:
            learner: who.
            said: about them; `knows` their base.
            copy: the parameters and buffers; it has the changes then.
        """
        is_late = said.base < self.version
        base = self.bases[said.base] if is_late else self.newest
        changes = copy.tensors[: len(self._keys)]
        for outer, param in zip(base.tensors, changes, strict=False):
            torch.sub(outer, param, out=param)
        mine = Contribution(learner, said.steps, said.examples, bool(said.is_counted), is_late, copy)
        for each in list(self.pending):
            if each.learner == learner and (each.is_counted == mine.is_counted or not self._rule.by_examples):
                torch._foreach_add_(changes, each.changes.tensors[: len(changes)])
                steps, examples = mine.steps + each.steps, mine.examples + each.examples
                mine = mine._replace(steps=steps, examples=examples)
                self.pending.remove(each)
        self.pending.append(mine)
        self.missing.discard(learner)
        if is_late or not said.full_us:
            self._by_clock.add(learner)
        else:
            self._by_clock.discard(learner)
            self._full_s.append(said.full_us / 1e6)
        return is_late

    def take(self, learner: int) -> None:
        """Note that a learner goes on from the newest outer parameters."""
        self.based[learner] = self.version
        self._forget_bases()

    def lose(self, learner: int) -> None:
        """Note that a learner is lost; what it has brought stays."""
        self.based.pop(learner, None)
        self._forget_bases()

    def let_go(self, learner: int) -> None:
        """Note that a learner does not wait for the end of the round; what it has brought stays."""
        self.pending = [
            each._replace(is_late=True) if each.learner == learner else each for each in self.pending
        ]
        self._by_clock.add(learner)

    def is_behind(self, learner: int) -> bool:
        """Return whether an outer step was taken without a learner, which has not come since."""
        return self.based.get(learner, self.version) < self.version

    def left_s(self, learner: int, now_s: float) -> float | None:
        """Return how many seconds a learner trains that goes on now; None: as long as all its steps take."""
        if learner not in self._by_clock or self._round_s is None:
            return None
        left_s = self._round_s - (now_s - self._opened_s)
        if left_s > 0:
            return left_s
        return 0.0 if self._there_since_s is not None else None  # the others are due, and may not train

    def _forget_bases(self) -> None:
        used = set(self.based.values())
        self.bases = {version: copy for version, copy in self.bases.items() if version in used}

    # -- outer steps --------------------------------------------------------------------------------

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
        if not waiting:  # late changes alone are none: the momentum would go on without anything new
            return False
        if self._there_since_s is None:
            self._there_since_s = now_s
        self._training = training
        return training - self.missing <= waiting or now_s - self._there_since_s >= self._rule.grace_s

    @property
    def is_mixed(self) -> bool:
        """Whether examples were counted by some of those that have arrived, and not by others."""
        return self._rule.by_examples and len({each.is_counted for each in self.pending}) > 1

    def step(self, now_s: float) -> tuple[int, ...]:
        """Take an outer step with what has arrived; return whose it was."""
        arrived = sorted(self.pending, key=lambda each: each.learner)
        count = len(self._keys)
        for each, share in zip(arrived, self._shares(arrived), strict=True):
            if share != 1:
                each.changes.scale_(share)
        first, *others = (each.changes for each in arrived)
        first.become_mean(others)
        self.outer.step(dict(zip(self._keys, first.tensors[:count], strict=True)))
        for buffer, mean in zip(self.newest.tensors[count:], first.tensors[count:], strict=True):
            buffer.copy_(mean)
        in_time = {each.learner for each in arrived if not each.is_late}
        self.bases[self.version] = self.published
        self.version, self.pending, self._there_since_s = self.version + 1, [], None
        self.publish()
        self._forget_bases()
        self.missing = set(self._training - in_time)
        self._round_s = statistics.median_low(self._full_s) if self._full_s else None
        self._opened_s, self._full_s = now_s, []
        return tuple(each.learner for each in arrived)

    def _shares(self, arrived: Sequence[Contribution]) -> list[float]:
        """Return what each is multiplied by, so that the mean is the weighted one; 1 for equal weights."""
        if not self._rule.by_examples:
            return [1.0] * len(arrived)
        weights = [Fraction(each.examples**2, each.steps) for each in arrived]
        return [float(len(arrived) * weight / sum(weights)) for weight in weights]
