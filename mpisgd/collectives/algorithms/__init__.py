"""All-reduce algorithms over point to point, each in its own file, each equal to the others.

Every one is a function `(link, flat, op)` that combines the contiguous [n] tensor `flat` over the ranks in
place. Each element is finished by one rank and then copied, so all ranks end with the same bits.
"""

from collections.abc import Callable

from torch import Tensor

from mpisgd.collectives.algorithms.all_to_all import all_to_all
from mpisgd.collectives.algorithms.halving_doubling import halving_doubling
from mpisgd.collectives.algorithms.reduce_broadcast import reduce_broadcast
from mpisgd.collectives.algorithms.ring import ring
from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import Link

__all__ = ["ALGORITHMS", "Link"]

ALGORITHMS: dict[str, Callable[[Link, Tensor, ReduceOp], None]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "reduce_broadcast": reduce_broadcast,
    "all_to_all": all_to_all,
}
