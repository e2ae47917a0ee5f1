"""Flags of gradients: whether one is there, and sparse, on this rank and, joined bit by bit, on any rank.

Where no rank has a gradient it stays None, as in one process: momentum and weight decay then leave the
parameter alone. So each rank sends a byte per parameter. It travels with the bucket, before whose operation
it is known, and costs no synchronization of its own.
"""

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce, reduce_ahead
from mpisgd.collectives.dispatch import PreparedCall
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp

__all__ = [
    "ALL_DENSE",
    "DENSE",
    "IN_BACKWARD",
    "IN_STEP",
    "MISSING",
    "NONFINITE",
    "SPARSE",
    "FlagsExchange",
    "flag_of",
    "flags_of",
    "join_rest",
]

MISSING, DENSE, SPARSE = 0, 1, 2
ALL_DENSE = bytes([DENSE])  # to strip from many
_is_sparse = operator.attrgetter("is_sparse")
NONFINITE = 4  # added to these, where somebody has looked
# When this rank reduces them; one more byte, beside those of the gradients.
IN_BACKWARD, IN_STEP = 1, 2


def flag_of(grad: Tensor | None) -> int:
    """Return MISSING, DENSE or SPARSE."""
    if grad is None:
        return MISSING
    return SPARSE if grad.is_sparse else DENSE


def flags_of(grads: Sequence[Tensor | None]) -> bytes:
    """Return those of several gradients. There may be hundreds, as a rule all dense, and every step asks."""
    some_are_missing = any(map(operator.is_, grads, itertools.repeat(None)))
    if some_are_missing or any(map(_is_sparse, grads)):
        return bytes(map(flag_of, grads))
    return ALL_DENSE * len(grads)


class FlagsExchange:
    """Joins the flags of some gradients over the ranks, within the operation that reduces these gradients.

    Args:
        mine: this rank's flags.
        group: the ranks.
        note: bits that are joined, too; 0: nothing to tell on any rank.

    Attributes:
        mine: as given.
        joined: those of all ranks, once they are known.
        noted: the bits of all ranks, once they are known.
    """

    def __init__(self, mine: bytes, group: Group, note: int = 0) -> None:
        self.mine = mine
        self.sent = mine + bytes([note]) if note else mine
        self.joined: bytes | None = None if self.sent else b""
        self.noted = 0
        self._group = group
        self._flat: Tensor  # from `before` on
        self._reduction: PreparedCall

    def mark(self, place: int, bit: int) -> None:
        """Add a bit to one of this rank's flags, before they are exchanged."""
        marked = bytearray(self.mine)
        marked[place] |= bit
        self.mine, self.sent = bytes(marked), bytes(marked) + self.sent[len(marked) :]

    def before(self) -> None:
        """Show this rank's flags; before the consistency check of the operation."""
        self._flat = torch.frombuffer(bytearray(self.sent), dtype=torch.uint8)
        self._reduction = reduce_ahead(self._group, self._flat, ReduceOp.BOR)
        self._reduction.begin()

    def finish(self) -> None:
        """Join those of all ranks; after the check, before anything else of the operation."""
        self._reduction.run()
        self.take(self._flat.numpy().tobytes())

    def take(self, joined: bytes) -> None:
        """Take what all ranks have sent, joined."""
        self.joined = joined[: len(self.mine)]
        self.noted = joined[-1] if len(self.sent) > len(self.mine) else 0


def join_rest(exchanges: Sequence[FlagsExchange], group: Group) -> bytes:
    """Return the joined flags of all exchanges, in order. Collective where some are not over.

    Those whose gradients a device has sent by itself, without a consistency check, are joined here.
    """
    rest = [exchange for exchange in exchanges if exchange.joined is None]
    if rest:
        flat = torch.frombuffer(bytearray().join(exchange.sent for exchange in rest), dtype=torch.uint8)
        all_reduce(flat, ReduceOp.BOR, group)
        joined = flat.numpy().tobytes()
        for exchange in rest:
            exchange.take(joined[: len(exchange.sent)])
            joined = joined[len(exchange.sent) :]
    return b"".join(exchange.joined or b"" for exchange in exchanges)
