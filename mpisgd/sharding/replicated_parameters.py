"""`ReplicatedParameters`: every rank has all parameters in its own memory, and updates its pieces there."""

import torch

from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.fusion_buffer import layout_of
from mpisgd.sharding.divided_parameters import DividedParameters, Named

__all__ = ["ReplicatedParameters", "check_divisible"]


class ReplicatedParameters(DividedParameters):
    """Leaves large parameters where they are. After a step, owners send their pieces to everyone."""

    def _check(self, named: Named) -> None:
        check_divisible(named)


def check_divisible(named: Named) -> None:
    """Raise unless parts of all parameters can be updated where they lie.

    Raises:
        UnsupportedTensor: one is on a GPU, or not dense.
        InvalidArgument: one is a view with gaps.
    """
    for name, param in named:
        if not param.is_cpu or param.layout is not torch.strided:
            where = f"on {param.device}, {param.layout}"
            raise UnsupportedTensor(f"Sharded: {name} is {where}; dense parameters on the CPU can be divided")
        if param.numel() and param.stride() != layout_of(param).stride:
            raise InvalidArgument(
                f"Sharded: {name} has the strides {param.stride()}, which leave gaps in memory; make it "
                "contiguous before the optimizer is wrapped"
            )
