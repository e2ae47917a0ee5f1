"""What every collective does before it starts."""

from torch import Tensor

from mpisgd.comm.algorithms.link import Link
from mpisgd.comm.buffers import dtype_name
from mpisgd.comm.dtypes import ReduceOp
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Operation

__all__ = ["link_of", "operation_on"]


def operation_on(
    kind: str, tensor: Tensor, *, op: ReduceOp | None = None, root: int = -1, extra: str = ""
) -> Operation:
    """Describe an operation whose tensor must be alike on all ranks."""
    name = op.name if op is not None else ""
    return Operation(kind, name, dtype_name(tensor.dtype), tuple(tensor.shape), root, extra)


def link_of(group: Group, kind: str) -> Link:
    """Return the lane's communicator as the algorithms see it."""
    lane = group.lane
    return Link(lane.wire, f"{kind} (group '{group.name}')", lane.handshake.timeout_s)
