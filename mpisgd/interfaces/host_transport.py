"""`HostTransport`: what moves tensors in host memory between the ranks of a group, besides MPI itself.

A group has an ordered list of them. `mpisgd.collectives.dispatch` takes the first that does an operation, and
MPI where none does. An operation is a generator of steps, which yields wherever all ranks must have arrived:

    first part   comes before the ranks have agreed on the operation. It may write into this rank's coming
                 half of the staging memory and nothing else: where the ranks disagree, all raise, and their
                 tensors are as before.
    the rest     is run by `run_steps`, once they have agreed.

The generator keeps alive what it passes the addresses of.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.interfaces.communicator import DigestExchange
from mpisgd.memory_ranges import MemoryRange, Span

__all__ = ["AtOnce", "HostMemory", "HostTransport", "Region", "Segment", "Steps"]

Steps = Iterator[None]
_Tensors = TypeVar("_Tensors", contravariant=True)


class Segment(Protocol):
    """Memory with a share for each rank of a host, visible to all of them. Its tensors keep it alive."""

    def share(self, rank: int) -> Tensor:
        """Return the bytes of local rank `rank`, [share_bytes] of uint8."""

    def share_as(self, rank: int, numel: int, dtype: torch.dtype, *, start: int = 0) -> Tensor:
        """Return `numel` elements of the share of `rank`, from its byte `start` on; a storage of its own."""


class Region(Protocol):
    """A tensor [n] per rank of a host in shared memory, which is reduced where it lies."""

    @property
    def mine(self) -> Tensor:
        """This rank's, an ordinary tensor between operations."""

    @property
    def everyones(self) -> Sequence[Tensor]:
        """Those of all ranks of the host, in their order."""


class AtOnce(Protocol[_Tensors]):
    """An operation on small tensors of one form: the consistency check is the only meeting of the ranks.

    The tensors hold their elements in order, as they are. One call is on its way at a time.
    """

    def begin(self, tensors: _Tensors, /) -> None:
        """Do the first part of an operation: tell the others what the tensors of this call hold."""

    def finish(self, tensors: _Tensors, /) -> None:
        """Do the rest of it: write the result into them."""


class HostMemory(Protocol):
    """The memory that the ranks of a group on one host see. All methods are collective over these ranks.

    They are called inside the queue, after the consistency check, and take contiguous CPU tensors.

    Attributes:
        rank: this rank among those of the host.
        size: how many there are.
    """

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait for the ranks of this host, in the middle of an operation."""

    def run_steps(self, steps: Steps) -> None:
        """Run steps to their end, with a barrier wherever they yield."""

    def exchange_spans(self, sends: Sequence[Span], receives: Sequence[Span], length: int) -> Steps:
        """Write this rank's stream of bytes and read from all of them.

        The caller keeps the memory that the spans describe. What is received must not overwrite bytes that
        are still to be sent, unless they are those very bytes.

        Args:
            sends: this rank's stream.
            receives: what it wants of the streams.
            length: of the longest stream, in bytes; the same on all ranks.

        Cost: two passes over the bytes, one of them in cache; a barrier per chunk.
        """

    def reduce_to_owners(
        self,
        chunks: Sequence[Sequence[MemoryRange]],
        own: Sequence[Tensor],
        combine: Callable[[int, Sequence[Tensor]], None],
        *,
        in_place: bool,
    ) -> Steps:
        """Bring what everyone has for a rank to that rank, chunk by chunk; they have their own pace after it.

        Args:
            chunks: for each rank what this one has for it, each at most
                `mpisgd.transport.staging_layout.slot_bytes`; as many on all ranks.
            own: those for this rank.
            combine: called with the number of an own chunk and everyone's [n], in rank order.
            in_place: whether `combine` writes to this rank's own chunk.

        Cost: one barrier per chunk of the rank that owns most.
        """

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object, in the order of the ranks of the host."""

    def open_segment(self, nbytes: int) -> Segment | None:
        """Return new memory, `nbytes` for each rank; None on all of them if one cannot have it."""

    def open_region(self, numel: int, dtype: torch.dtype) -> Region | None:
        """Return a tensor [numel] per rank in new memory; None on all of them if one cannot have it."""


class HostTransport(Protocol):
    """A transport of tensors in host memory. Those of this package derive from it.

    A transport has the methods of the operations that it `takes`; the others are never called. They are
    called inside the queue by all ranks alike and take contiguous CPU tensors; roots are group ranks. Inputs
    overlap no output, unless they are the very range that their copy would go to.

    Attributes:
        name: of its all-reduce algorithm, in profiles and in timelines.
        spans_hosts: whether it is for ranks on several hosts.
        shares_memory: whether the ranks of each host see the same memory, those that are not alone there.
        memory: what the ranks of this host see; None where this rank is alone on it.
        digest_exchange: how its ranks compare what they are about to do; None: as those of another one.
    """

    name: str
    spans_hosts: bool
    shares_memory: bool = False

    @property
    def memory(self) -> HostMemory | None:
        """See above."""
        raise _missing(self, "memory")

    @property
    def digest_exchange(self) -> DigestExchange | None:
        """See above."""
        raise _missing(self, "digest_exchange")

    def takes(self, collective: str, dtype: torch.dtype | None, nbytes: int) -> bool:
        """Return whether it does an operation; the same on all ranks.

        Args:
            collective: the name of one of the methods below; `all_to_all` means `all_to_all_equal`, too.
            dtype: of what is reduced; None where data is only moved, or has several dtypes.
            nbytes: of the larger side of a rank; 0 where ranks do not know each other's sizes.
        """
        raise _missing(self, "takes")

    def run_steps(self, steps: Steps) -> None:
        """Run an operation to its end, after the ranks have agreed on it."""
        raise _missing(self, "run_steps")

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Steps:
        """Combine `flat` [n], of any reducible dtype, over the ranks, in place."""
        raise _missing(self, "all_reduce")

    def all_reduce_at_once(self, numel: int, dtype: torch.dtype, op: ReduceOp) -> AtOnce[Tensor] | None:
        """Return the `all_reduce` of [numel] where it needs no steps after the first part; else None."""
        return None

    def broadcast_at_once(self, nbytes: int, root: int) -> AtOnce[Tensor] | None:
        """Return the `broadcast` of so many bytes likewise."""
        return None

    def all_gather_at_once(self, nbytes: int) -> AtOnce[tuple[Tensor, Tensor]] | None:
        """Return the `all_gather` of so many bytes of each rank likewise, of (output, input)."""
        return None

    def all_reduce_now(self, flat: Tensor, op: ReduceOp, region: Region | None = None) -> None:
        """Do an `all_reduce` as a part of an operation that the ranks have agreed on.

        Args:
            flat: [n]; overwritten.
            op: elementwise combination.
            region: in whose memory `flat` lies, if it does on all ranks that are not alone on their host: it
                is then combined there, without staging.
        """
        raise _missing(self, "all_reduce_now")

    def suits_uncached(self, flat: Tensor) -> bool:
        """Return whether its all-reduce is as quick as it is said to be for what has left the caches."""
        return True

    def reduce(self, flat: Tensor, op: ReduceOp, root: int) -> Steps:
        """Combine `flat` [n] over the ranks into root's; the others keep theirs."""
        raise _missing(self, "reduce")

    def reduce_scatter(self, parts: Sequence[MemoryRange], own: Tensor, op: ReduceOp, out: Tensor) -> Steps:
        """Combine everyone's part number `rank` into `out` [n].

        Args:
            parts: this rank's part for each rank, `own` [n] for itself; `out` overlaps none of them.
            own: see `parts`.
            op: elementwise combination.
            out: of the same dtype.
        """
        raise _missing(self, "reduce_scatter")

    def broadcast(self, ranges: Sequence[MemoryRange], root: int) -> Steps:
        """Copy what lies in root's ranges into everyone's, of the same sizes."""
        raise _missing(self, "broadcast")

    def gather(self, outputs: Sequence[MemoryRange], mine: MemoryRange, root: int) -> Steps:
        """Copy `mine` of the r-th rank into root's `outputs[r]`, of the same size; no outputs elsewhere."""
        raise _missing(self, "gather")

    def scatter(self, mine: MemoryRange, pieces: Sequence[MemoryRange], root: int) -> Steps:
        """Copy root's `pieces[r]` into `mine` of the r-th rank, of the same size; no pieces elsewhere."""
        raise _missing(self, "scatter")

    def all_gather(self, outputs: Sequence[MemoryRange], mine: MemoryRange) -> Steps:
        """Copy `mine` of the r-th rank into everyone's `outputs[r]`; sizes may differ by rank."""
        raise _missing(self, "all_gather")

    def all_to_all(
        self, outputs: Sequence[MemoryRange], inputs: Sequence[MemoryRange], sizes: Sequence[Sequence[int]]
    ) -> Steps:
        """Copy `inputs[r]` into `outputs[this rank]` of the r-th rank; `sizes[src][dst]`: in bytes."""
        raise _missing(self, "all_to_all")

    def all_to_all_equal(self, output: MemoryRange, source: MemoryRange) -> Steps:
        """Do `all_to_all` where both are cut into equal pieces."""
        raise _missing(self, "all_to_all_equal")

    def exchange_spans(self, sends: Sequence[Span], receives: Sequence[Span], length: int) -> Steps:
        """Write this rank's stream of bytes and read from those of all ranks; see `HostMemory`."""
        raise _missing(self, "exchange_spans")

    def use_leaders(self, best: Callable[[int, bool], int]) -> None:
        """Ask `best` from now on how many ranks of each host should exchange messages with other hosts.

        Args:
            best: of the bytes of a message and whether it is of 16-bit floats; the same on all ranks.
        """
        return  # not every transport has such ranks

    def guarded(self, *, alone: bool = False) -> Sequence[Tensor]:
        """Return the memory that this rank may not write before the ranks have agreed on an operation.

        Args:
            alone: whether no other rank runs meanwhile, so that what the others may write counts, too.
        """
        return ()

    def revoke(self) -> None:
        """Let no other rank reach this one's memory any more: it leaves an operation that has failed here."""
        return  # most never let them

    def close(self) -> None:
        """Free what it has opened. Collective."""
        return


def _missing(transport: HostTransport, method: str) -> NotImplementedError:
    return NotImplementedError(f"transport {transport.name!r} has no {method}, and takes no such operation")
