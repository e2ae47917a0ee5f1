"""`Training`: what a strategy is made to work on."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.options import ReductionOptions
from mpisgd.sharding.update_work import check_not_whole

__all__ = ["Training", "check_elementwise", "continuous_by_key"]


class Training(NamedTuple):
    """The optimizer, parameters, ranks and options that a strategy works with.

    Attributes:
        optimizer_ref: a weak reference to the wrapped optimizer: when the program drops the optimizer, it
            must be freed at once on every rank, or it would continue to reduce gradients.
        named: all its parameters, with names, in the order of its groups.
        group: the ranks that train together.
        options: how gradients are reduced, if the strategy reduces them.
        share_parameters: whether a host keeps one copy of the parameters.
        elementwise: as for `DistributedOptimizer`.
        check_in_sync_every: as for `DistributedOptimizer`.
        buffers: further tensors that are averaged with the parameters, such as those of BatchNorm.
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


def continuous_by_key(prefix: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the memory that those with a fraction have now, by prefix and place: not to be kept."""
    return {
        f"{prefix}{place}": tensor.detach()
        for place, tensor in enumerate(tensors)
        if tensor.is_floating_point() or tensor.is_complex()
    }


def check_elementwise(training: Training) -> None:
    """Raise where parameters would be cut, and the optimizer is known to update them as a whole.

    Raises:
        InvalidArgument: see `check_not_whole`.
    """
    if training.elementwise:
        check_not_whole(training.optimizer)
