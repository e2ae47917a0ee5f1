"""What kind of gradient a parameter has, on this rank and, joined bit by bit, on any rank.

Where no rank has a gradient it stays None, as in one process: momentum and weight decay then leave the
parameter alone. So each rank sends a byte per parameter. It travels with the bucket, before whose operation
it is known, and costs no synchronization of its own.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce, reduce_flat
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.transport.shm import reduction

__all__ = ["ALL_DENSE", "DENSE", "MISSING", "NONFINITE", "SPARSE", "KindsExchange", "join_rest", "kind_of"]

MISSING, DENSE, SPARSE = 0, 1, 2
ALL_DENSE = bytes([DENSE])  # to strip from many
NONFINITE = 4  # besides its kind, where somebody has looked


def kind_of(grad: Tensor | None) -> int:
    """Return MISSING, DENSE or SPARSE."""
    if grad is None:
        return MISSING
    return SPARSE if grad.is_sparse else DENSE


class KindsExchange:
    """Joins the kinds of some gradients over the ranks, within the operation that reduces these gradients.

    Attributes:
        mine: this rank's kinds.
        is_over: whether `joined` can be asked for.
    """

    def __init__(self, mine: bytes, group: Group) -> None:
        self.mine = mine
        self.is_over = not mine
        self._everyones = bytearray(mine)
        self._group = group
        self._flat = torch.frombuffer(self._everyones, dtype=torch.uint8) if mine else None
        self._steps = None if self._flat is None else _steps(group, self._flat)

    @property
    def joined(self) -> bytes:
        """The kinds on all ranks."""
        assert self.is_over
        return bytes(self._everyones)

    def before(self) -> None:
        """Show this rank's kinds; before the consistency check of the operation."""
        if self._steps is not None:
            next(self._steps)

    def finish(self) -> None:
        """Join those of all ranks; after the check, before anything else of the operation."""
        transport = self._group.shm or self._group.internode
        if transport is not None and self._steps is not None:
            transport.run_steps(self._steps)
        elif self._flat is not None:
            reduce_flat(self._group, self._flat, ReduceOp.BOR, "mpi")
        self.is_over = True

    def take(self, joined: bytes) -> None:
        """Take over what was joined by another operation."""
        self._everyones[:] = joined
        self.is_over = True


def _steps(group: Group, flat: Tensor) -> Iterator[None] | None:
    """Return what joins `flat` in shared memory or between hosts, and yields for the consistency check."""
    if group.shm is not None:
        return reduction.all_reduce(group.shm, flat, ReduceOp.BOR)
    return None if group.internode is None else group.internode.all_reduce(flat, ReduceOp.BOR)


def join_rest(exchanges: Sequence[KindsExchange], group: Group) -> bytes:
    """Return the joined kinds of all exchanges, in order. Collective where some are not over.

    Those whose gradients a device has sent by itself, without a consistency check, are joined here.
    """
    rest = [exchange for exchange in exchanges if not exchange.is_over]
    if rest:
        joined = bytearray(b"".join(exchange.mine for exchange in rest))
        all_reduce(torch.frombuffer(joined, dtype=torch.uint8), ReduceOp.BOR, group)
        start = 0
        for exchange in rest:
            exchange.take(bytes(joined[start : start + len(exchange.mine)]))
            start += len(exchange.mine)
    return b"".join(exchange.joined for exchange in exchanges)
