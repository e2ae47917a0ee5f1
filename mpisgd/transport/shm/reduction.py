"""The reductions through the staging memory of a host, in chunks that stay in cache.

Of a chunk of an all-reduce, a rank copies the parts that belong to the others into its staging memory; when
all have, it combines its own part straight from everyone's memory; when all have, it copies the finished
parts out. Two halves of the staging memory are used in turn, so that a fast rank may fill one while a slow
one still reads the other:

    rank 0   in(0) | reduce(0) | out(0) in(1) | reduce(1) | out(1) in(2) | ...
    rank 1   in(0) | reduce(0) | out(0) in(1) | reduce(1) | out(1) in(2) | ...
    half       0         0         0      1         1         1      0

They yield wherever all ranks of the host must have come (`mpisgd.transport.shm.streams`). All take contiguous
CPU tensors of any reducible dtype; roots are group ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mpisgd.core.dtypes import ADDED_AS_THEY_ARE, ReduceOp, combine_in_rank_order
from mpisgd.transport.shm.segment import HALF_BYTES
from mpisgd.transport.shm.streams import CHUNK_BYTES, Place, bring_near, copy_bytes

if TYPE_CHECKING:
    from mpisgd.transport.shm.transport import ShmTransport

__all__ = [
    "all_reduce",
    "all_reduce_at_once",
    "all_reduce_in_parts",
    "reduce",
    "reduce_at_root",
    "reduce_in_parts",
    "reduce_scatter",
    "reduce_to_owners",
]

# Below this every rank adds up everything: reading more takes less time than meeting once more.
AT_ONCE_BYTES = 2**19
READ_BY_EACH_BYTES = 2**20
# What each rank adds up of a chunk of an all-reduce. 2 ranks on 2 cores took 5 % longer with half of it and
# with twice as much, 4 ranks on them 20 % longer with half of it.
PART_BYTES = 2**18
# Sharing the work of a reduction costs a second meeting per chunk. It pays where there is much work for one:
# many pieces, or a dtype that is converted before it is added. Measured with 2 to 4 ranks on 2 cores: alone,
# the root took 0.5 to 0.8 of the time for float32, and 1.3 times as long for bfloat16 of 256 KiB and more.
MAX_PIECES_OF_ONE = 4
MAX_BYTES_OF_ONE = 2**17
ALIGN_BYTES = 64


def all_reduce(plane: "ShmTransport", flat: Tensor, op: ReduceOp) -> Iterator[None]:
    """Combine `flat` [n] over the ranks, in place."""
    at_once = flat.nbytes <= AT_ONCE_BYTES and flat.nbytes * plane.size <= READ_BY_EACH_BYTES
    return (all_reduce_at_once if at_once else all_reduce_in_parts)(plane, flat, op)


def all_reduce_at_once(plane: "ShmTransport", flat: Tensor, op: ReduceOp) -> Iterator[None]:
    """Every rank combines the whole of a small message for itself.

    Cost: one meeting; every rank reads everyone's message.
    """
    copy_bytes(plane.coming_half()[plane.rank], flat.data_ptr(), flat.nbytes)
    yield
    plane.advance()
    combine_in_rank_order(plane.present_half((0,) * plane.size, flat.numel(), flat.dtype), op, out=flat)


def all_reduce_in_parts(plane: "ShmTransport", flat: Tensor, op: ReduceOp) -> Iterator[None]:
    """Every rank combines its own part of a chunk for all.

    Cost: two meetings per chunk; three passes over the message, two of them in cache.
    """
    address, itemsize = flat.data_ptr(), flat.element_size()
    for chunk in _chunks(flat.numel(), min(HALF_BYTES, plane.size * PART_BYTES) // itemsize):
        first = chunk.start
        at = address + first * itemsize
        parts = plane.coming_parts(chunk.stop - first, flat.dtype)
        parts.give(at)
        yield
        plane.advance()
        parts.combine(flat, first, at, op)
        yield
        parts.take(at)


def reduce(plane: "ShmTransport", flat: Tensor, op: ReduceOp, root: int) -> Iterator[None]:
    """Combine `flat` [n] over the ranks into root's; the others keep theirs."""
    heavy = plane.size > MAX_PIECES_OF_ONE or flat.dtype not in ADDED_AS_THEY_ARE
    share = heavy and flat.nbytes > MAX_BYTES_OF_ONE
    return (reduce_in_parts if share else reduce_at_root)(plane, flat, op, root)


def reduce_at_root(plane: "ShmTransport", flat: Tensor, op: ReduceOp, root: int) -> Iterator[None]:
    """The root combines everything while the others write the next chunk.

    Cost: one meeting per chunk; the root's work grows with the number of ranks.
    """
    for chunk in _chunks(flat.numel(), CHUNK_BYTES // flat.element_size()):
        mine = flat[chunk]
        where_it_lies = plane.rank == root < 2  # the first two are read before anything is written
        if not where_it_lies:
            copy_bytes(plane.coming_half()[plane.rank], mine.data_ptr(), mine.nbytes)
        yield
        plane.advance()
        if plane.rank != root:
            continue
        pieces = plane.present_half((0,) * plane.size, mine.numel(), flat.dtype)
        if where_it_lies:
            pieces = [*pieces[:root], mine, *pieces[root + 1 :]]
        combine_in_rank_order(pieces, op, out=mine)


def reduce_in_parts(plane: "ShmTransport", flat: Tensor, op: ReduceOp, root: int) -> Iterator[None]:
    """Every rank combines its own part of a chunk, into the first rank's memory, whence the root copies all.

    Cost: two meetings per chunk; the work is shared.
    """
    address, itemsize = flat.data_ptr(), flat.element_size()
    for chunk in _chunks(flat.numel(), CHUNK_BYTES // itemsize):
        numel = chunk.stop - chunk.start
        at = address + chunk.start * itemsize
        parts, result = plane.coming_parts(numel, flat.dtype), plane.coming_half()[0]
        parts.give(at)
        yield
        plane.advance()
        parts.combine_into_first(flat, chunk.start, op)
        yield
        if plane.rank == root:
            copy_bytes(at, result, numel * itemsize)


def reduce_scatter(
    plane: "ShmTransport", parts: Sequence[Place], own: Tensor, op: ReduceOp, out: Tensor
) -> Iterator[None]:
    """Combine everyone's part number `rank` into `out` [n].

    Args:
        plane: of the host.
        parts: where this rank's part for each rank lies, `own` [n] for itself; `out` overlaps none of them.
        own: see `parts`.
        op: elementwise combination.
        out: of the same dtype.

    Cost: one meeting per chunk; every rank writes what is for the others and combines what is its own.
    """
    rank, size, itemsize = plane.rank, plane.size, out.element_size()
    for chunk in _chunks(out.numel(), max(1, 2 * CHUNK_BYTES // (itemsize * (size - 1)))):
        first, nbytes = chunk.start * itemsize, (chunk.stop - chunk.start) * itemsize
        address = plane.coming_half()[rank]
        for slot, (part, _) in enumerate((*parts[rank + 1 :], *parts[:rank])):
            copy_bytes(address + slot * nbytes, part + first, nbytes)
        yield
        plane.advance()
        starts = tuple((rank - src - 1) % size * nbytes if src != rank else 0 for src in range(size))
        pieces = list(plane.present_half(starts, chunk.stop - chunk.start, out.dtype))
        pieces[rank] = own[chunk]
        combine_in_rank_order(pieces, op, out=out[chunk])


def reduce_to_owners(
    plane: "ShmTransport", flats: Sequence[Tensor], owners: Sequence[int], op: ReduceOp
) -> Iterator[None]:
    """Combine everyone's `flats[i]` [n_i] into that of `owners[i]`; the others keep theirs.

    All owners work at once: what is written for them and what they combine has about the same size on every
    rank if what they own has.

    Cost: one meeting per chunk of those who own most; every rank writes what is for the others and combines
    what is its own.
    """
    slot_bytes = HALF_BYTES // plane.size // ALIGN_BYTES * ALIGN_BYTES
    queues: list[list[Tensor]] = [[] for _ in range(plane.size)]
    for flat, owner in zip(flats, owners, strict=True):
        queues[owner] += [flat[chunk] for chunk in _chunks(flat.numel(), slot_bytes // flat.element_size())]
    where_it_lies = plane.rank < 2  # the first two are read before anything is written
    starts = (plane.rank * slot_bytes,) * plane.size
    for chunks in itertools.zip_longest(*queues):
        address = plane.coming_half()[plane.rank]
        for owner, chunk in enumerate(chunks):
            if chunk is not None and not (owner == plane.rank and where_it_lies):
                copy_bytes(address + owner * slot_bytes, chunk.data_ptr(), chunk.nbytes)
        yield
        plane.advance()
        if (own := chunks[plane.rank]) is not None:
            bring_near(own)
            pieces = plane.present_half(starts, own.numel(), own.dtype)
            if where_it_lies:
                pieces = [*pieces[: plane.rank], own, *pieces[plane.rank + 1 :]]
            combine_in_rank_order(pieces, op, out=own)


def _chunks(numel: int, step: int) -> list[slice]:
    """Cut `numel` elements into chunks of `step`, at least one."""
    return [slice(start, min(numel, start + step)) for start in range(0, max(1, numel), step)]
