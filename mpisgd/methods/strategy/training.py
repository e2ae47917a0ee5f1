"""`Training`: what a strategy is made to work on."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.options import ReductionOptions

__all__ = ["Training"]


class Training(NamedTuple):
    """What a strategy is made to work on.

    Attributes:
        optimizer_ref: a weak reference to the wrapped optimizer: one that the program has forgotten must be
            gone at once, or it would go on reducing gradients, on each rank until another moment.
        named: all its parameters, with names, in the order of its groups.
        group: the ranks that train together.
        options: how gradients are to be reduced, where the strategy reduces them.
        share_parameters: whether a host keeps one copy of the parameters.
        elementwise: whether the user says that the optimizer updates each element by itself.
        check_in_sync_every: after how many steps it is to be seen that all ranks have the same parameters.
        buffers: further tensors that are averaged where parameters are, such as those of BatchNorm.
    """

    optimizer_ref: "weakref.ref[torch.optim.Optimizer]"
    named: Sequence[tuple[str, Tensor]]
    group: Group
    options: ReductionOptions
    share_parameters: bool = False
    elementwise: bool = False
    check_in_sync_every: int = 0
    buffers: Sequence[Tensor] = ()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        optimizer = self.optimizer_ref()
        assert optimizer is not None
        return optimizer

    @property
    def params(self) -> list[Tensor]:
        """The parameters of the optimizer, as its groups have them now."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]
