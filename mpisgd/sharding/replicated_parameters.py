"""`ReplicatedParameters`: every rank has all parameters in its own memory, and updates its pieces there."""

import sys

import torch

from mpisgd.accelerator.runtime import on_device
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.fusion_buffer import layout_of
from mpisgd.sharding.divided_parameters import DividedParameters, Named

__all__ = ["ReplicatedParameters", "check_divisible"]

# Of parameters whose master is in host memory: while one piece is updated, the gradient of another comes, and
# what was updated before goes back.
OFFLOADED_BYTES = 4 * 2**20


class ReplicatedParameters(DividedParameters):
    """Leaves large parameters where they are. After a step, owners send their pieces to everyone."""

    def _check(self, named: Named) -> None:
        check_divisible(named)

    @property
    def _piece_bytes(self) -> int:
        """Most bytes of a piece. A device has no use for small ones."""
        if self._masters_on_host:
            return OFFLOADED_BYTES
        is_on_device = any(on_device(param) for _, param in self.named)
        return sys.maxsize if is_on_device else super()._piece_bytes


def check_divisible(named: Named) -> None:
    """Raise unless parts of all parameters can be updated where they lie.

    Raises:
        UnsupportedTensor: one is neither on the CPU nor on a GPU, or not dense, or they are not together.
        InvalidArgument: one is a view with gaps.
    """
    for name, param in named:
        if not (param.is_cpu or on_device(param)) or param.layout is not torch.strided:
            where = f"on {param.device}, {param.layout}"
            raise UnsupportedTensor(
                f"Sharded: {name} is {where}; dense parameters on the CPU or a GPU can be divided"
            )
        if param.device != named[0][1].device:
            other, device = named[0][0], named[0][1].device
            raise UnsupportedTensor(
                f"Sharded: {name} is on {param.device} and {other} on {device}; all are to be on one device"
            )
        if param.numel() and param.stride() != layout_of(param).stride:
            raise InvalidArgument(
                f"Sharded: {name} has the strides {param.stride()}, which leave gaps in memory; make it "
                "contiguous before the optimizer is wrapped"
            )
