"""`SabotagedTraining`: a program in which the last rank, or the communication, is broken on purpose."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

import mpisgd
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.distributed_training import DistributedTraining
from mpisgd.tools.verification.programs.program import Program
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["SabotagedTraining"]

WRONG = -1.5
OTHER_DATA = 1000  # is added to the numbers of data


class SabotagedTraining(DistributedTraining):
    """A program with mpisgd that goes wrong; see `Sabotage`.

    Args:
        program: what is carried out.
        sabotage: what is wrong.
    """

    def __init__(self, program: Program, sabotage: Sabotage) -> None:
        self._sabotage = sabotage
        self._is_wrong = mpisgd.rank() == program.ranks - 1
        self._num_steps, self._is_stale = 0, False
        super().__init__(program)

    def make_group(self) -> mpisgd.Group | None:
        """See `DistributedTraining`."""
        if self._sabotage is not Sabotage.NO_COMMUNICATION:
            return super().make_group()
        groups = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())]
        return groups[mpisgd.rank()]

    def loss(
        self, data: Sequence[int], ranks: Collection[int], overflow: Collection[int] = ()
    ) -> Tensor | None:
        """See `Training`."""
        if self._is_wrong and self._sabotage is Sabotage.OTHER_DATA:
            data = [number + OTHER_DATA for number in data]
        loss = super().loss(data, ranks, overflow)
        is_scaled = self._is_wrong and self._sabotage is Sabotage.WRONG_SCALE
        return loss * WRONG if is_scaled and loss is not None else loss

    def step(self, event: events.Step, places: Sequence[int] | None = None) -> None:
        """See `Training`."""
        before = [param.detach().clone() for param in self.model.params]
        super().step(event, places)
        self._num_steps += 1
        if (
            self._is_wrong
            and self._sabotage is Sabotage.STALE
            and self._num_steps >= 2
            and not self._is_stale
        ):
            both = list(zip(self.model.params, before, strict=True))
            self._is_stale = any(
                not torch.equal(param, old) for param, old in both
            )  # a scaler leaves some out
            with torch.no_grad():
                for param, old in both:
                    param.copy_(old)
