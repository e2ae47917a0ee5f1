"""Methods whose ranks have models of their own, by their definitions, with all ranks in one process.

Of the others one process with everybody's losses is the definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fuzzing import program as events
from fuzzing.program import Event, Program
from fuzzing.training import Training

__all__ = ["Definition", "definition_of"]

LOCAL_SGD = re.compile(r"mpisgd\.LocalSGD\(sync_every=(\d+)\)")


class Definition(Protocol):
    """What a program computes on one of its ranks, by the definition of its method."""

    @property
    def model(self) -> Any:
        """The model of this rank."""

    @property
    def takes_part(self) -> bool:
        """Whether this rank trains now."""

    def do(self, event: Event) -> None:
        """Carry out an event, on all ranks."""

    def states(self) -> list[dict[str, Any]]:
        """Return the state dicts of this rank's optimizers."""


def definition_of(program: Program) -> Callable[[Program, int], Definition] | None:
    """Return what makes the definition of a program's method for a rank; None: it has none here."""
    options = dict(program.optimizers[0].options)
    found = LOCAL_SGD.fullmatch(options.get("strategy", ""))
    if found is None or len(program.optimizers) > 1 or "compression" in options:
        return None
    return lambda program, rank: _LocalSGD(program, rank, int(found.group(1)))


class _Ranks:
    """A training of each rank; what the ranks do together comes after each step.

    Args:
        program: what is carried out.
        rank: whose model is looked at.
    """

    def __init__(self, program: Program, rank: int) -> None:
        everyone = range(program.ranks)
        self._all = [Training(program, [each], program.ranks) for each in everyone]
        self._rank, self._num_ranks = rank, program.ranks
        self.model = self._all[rank].model

    @property
    def trainings(self) -> list[Training]:
        """Those of the ranks that train now."""
        return self._all[: self._num_ranks]

    @property
    def takes_part(self) -> bool:
        """See `Definition`."""
        return self._rank < self._num_ranks

    def do(self, event: Event) -> None:
        """See `Definition`."""
        match event:
            case events.Reload(ranks=ranks) if ranks and ranks != self._num_ranks:
                self._resize(ranks)
            case events.AddGroup() | events.SetFrozen() | events.Convert():
                for training in self._all:  # also those that may train again
                    training.do(event)
            case events.Broadcast():
                self._copy_from(event.src, self.trainings)
            case _:
                for training in self.trainings:
                    training.do(event)
        if isinstance(event, events.Step):
            self.after_step()

    def after_step(self) -> None:
        """Do what the ranks do together after a step."""

    def states(self) -> list[dict[str, Any]]:
        """See `Definition`."""
        return self._all[self._rank].states() if self.takes_part else []

    def _resize(self, num_ranks: int) -> None:
        """Go on with other ranks from the mean of the models."""
        self.average()
        new = self._all[self._num_ranks : num_ranks]
        self._copy_from(0, new)
        self._num_ranks = num_ranks
        for training in self.trainings:
            training.weight = num_ranks
            training.do(events.Reload())

    def _copy_from(self, src: int, trainings: Sequence[Training]) -> None:
        for training in trainings:
            if training is not self._all[src]:
                _overwrite(training.model.params, self._all[src].model.params)
                copies = self._all[src].states()  # of its own: torch keeps what it loads
                for optimizer, state in zip(training.optimizers, copies, strict=True):
                    optimizer.load_state_dict(state)

    def average(self) -> None:
        """Give all ranks the mean of their models."""
        for layer in self._all[0].layers:
            _average([training.model.params[layer] for training in self.trainings])


class _LocalSGD(_Ranks):
    """Each rank trains by itself; every so many steps all take the mean.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019.
    """

    def __init__(self, program: Program, rank: int, period: int) -> None:
        super().__init__(program, rank)
        self._period, self._steps = period, 0

    def after_step(self) -> None:
        """See `_Ranks`."""
        self._steps += 1
        if self._steps % self._period == 0:
            self.average()


@torch.no_grad()
def _average(params: Sequence[Tensor]) -> None:
    total = params[0].clone()
    for param in params[1:]:
        total += param
    total /= len(params)
    for param in params:
        param.copy_(total)


@torch.no_grad()
def _overwrite(params: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for param, other in zip(params, others, strict=True):
        param.copy_(other)
