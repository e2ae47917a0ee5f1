"""`ExampleCounts`: what each rank's model counts in a mean of models, where ranks may run out of data.

A rank counts as many examples as it has stepped with since that mean was last taken (McMahan et al. 2017,
FedAvg): x <- sum of n_i x_i / sum of n_j. Where no step was inside `join()` all count alike, and nothing is
sent for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.weight import Count, weight_of
from mpisgd.method_state import Pieces, alike, forget_own, own, pieces_of, take

__all__ = ["ExampleCounts", "StepExamples", "mean_in_place"]


class StepExamples(NamedTuple):
    """What a rank has stepped with.

    Attributes:
        num: of examples; 1 where nobody says how many there were.
        is_given: whether the program has said how many.
        is_uneven: whether ranks may run out of data.
    """

    num: int = 1
    is_given: bool = False
    is_uneven: bool = False


@dataclass
class ExampleCounts:
    """The examples of this rank; a part of the state of a method. Steps are numbered from 1.

    Attributes:
        total: of all steps.
        taken: what `total` was at the last mean, by the name of the mean.
        steps: how many there were.
        since: how many there were at the last mean, by its name.
        uneven: the last one inside `join()`.
        given: the last one inside with a number of examples.
        plain: the last one without.
    """

    total: int = own(0)
    taken: dict[str, int] = own(default_factory=dict)
    steps: int = alike(0)
    since: dict[str, int] = alike(default_factory=dict)
    uneven: int = alike(0)
    given: int = alike(0)
    plain: int = alike(0)

    def note(self, step: StepExamples) -> None:
        """Count a step."""
        self.steps += 1
        self.total += step.num
        if step.is_uneven:
            self.uneven = self.steps
        if step.is_given:
            self.given = self.steps
        else:
            self.plain = self.steps

    def begin(self, name: str, *, again: bool = True) -> None:
        """Note that a mean was taken, or that what it is of is there from now on.

        Args:
            name: of the mean.
            again: also where one was taken before.
        """
        if again or name not in self.since:
            self.since[name], self.taken[name] = self.steps, self.total

    def of_mean(self, name: str, group: Group) -> list[Count] | None:
        """Return the examples of all ranks since a mean was last taken; None: all alike. Collective.

        Raises:
            InvalidArgument: some of these steps had a number of examples, and others had none; on every rank.
        """
        since, mine = self.since.get(name, 0), self.total - self.taken.get(name, 0)
        self.begin(name)
        if self.uneven <= since:
            return None
        if self.given > since and self.plain > since:
            error = InvalidArgument(
                "join: some steps since the last mean of the models were taken with "
                "next_batch(examples=...), and others were not; give it in all of them, or in none"
            )
            error.on_every_rank = True
            raise error
        everyones = torch.empty(group.size, dtype=torch.int64)
        all_gather_into_tensor(everyones, torch.tensor([mine]), group)
        counts = [Count(number, number, int(number > 0)) for number in everyones.tolist()]
        return counts if any(count.last for count in counts) else None

    # -- as a part of a state -----------------------------------------------------------------------

    def pieces(self) -> Pieces:
        """See `Part`."""
        return pieces_of(self)

    def take(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """See `Part`."""
        take(self, alike, own, {})

    def forget_own(self) -> None:
        """See `Part`."""
        forget_own(self)


def mean_in_place(tensors: Sequence[Tensor], counts: Sequence[Count] | None, group: Group) -> None:
    """Replace tensors by their mean, in which each rank counts what it has; None: all alike. Collective."""
    if counts is None:
        all_reduce_coalesced(tensors, ReduceOp.AVG, group)
        return
    weight = weight_of(counts, group.rank)
    for tensor in tensors:
        weight.before(tensor)
    all_reduce_coalesced(tensors, ReduceOp.SUM, group)
    for tensor in tensors:
        weight.after(tensor)
