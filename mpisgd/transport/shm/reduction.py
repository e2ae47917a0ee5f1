"""The reductions through the staging memory of a host, in chunks that stay in cache.

Of a chunk of an all-reduce, a rank copies the parts that belong to the others into its staging buffer; when
all have, it combines its own part straight from everyone's buffer; when all have, it copies the finished
parts out. Each rank has two buffers, which are used in turn, so that a fast rank may fill one while a slow
one still reads the other:

    rank 0   in(0) | reduce(0) | out(0) in(1) | reduce(1) | out(1) in(2) | ...
    rank 1   in(0) | reduce(0) | out(0) in(1) | reduce(1) | out(1) in(2) | ...
    buffer     0         0         0      1         1         1      0

They yield wherever all ranks of the host must have arrived (`mpisgd.transport.shm.staging`). All take
contiguous CPU tensors of any reducible dtype; roots are group ranks.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.interfaces.host_transport import Steps
from mpisgd.memory_ranges import MemoryRange
from mpisgd.transport.shm.staging import copy_bytes, prefetch
from mpisgd.transport.shm.staging_memory import MAX_CACHED, StagingMemory
from mpisgd.transport.staging_layout import BUFFER_BYTES, CHUNK_BYTES, slot_bytes
from mpisgd.transport.torch_reduction import ADDED_AS_THEY_ARE, combine_in_rank_order

__all__ = [
    "all_reduce_in_parts",
    "reduce",
    "reduce_at_root",
    "reduce_in_parts",
    "reduce_scatter",
    "reduce_to_owners",
]

# What each rank adds up of a chunk of an all-reduce. 2 ranks on 2 cores took 5 % longer with half of it and
# with twice as much, 4 ranks on them 20 % longer with half of it.
PART_BYTES = 2**18
# Sharing the work of a reduction costs a second barrier per chunk. It pays where there is much work for one:
# many pieces, or a dtype that is converted before it is added. Measured with 2 to 4 ranks on 2 cores: alone,
# the root took 0.5 to 0.8 of the time for float32, and 1.3 times as long for bfloat16 of 256 KiB and more.
MAX_PIECES_OF_ONE = 4
MAX_BYTES_OF_ONE = 2**17


def all_reduce_in_parts(shm: StagingMemory, flat: Tensor, op: ReduceOp) -> Steps:
    """Every rank combines its own part of a chunk for all.

    Cost: two barriers per chunk; three passes over the message, two of them in cache.
    """
    address, itemsize = flat.data_ptr(), flat.element_size()
    for chunk in _chunks(flat.numel(), min(BUFFER_BYTES, shm.size * PART_BYTES) // itemsize):
        first = chunk.start
        at = address + first * itemsize
        parts = shm.partition_next(chunk.stop - first, flat.dtype)
        parts.copy_in(at)
        yield
        shm.swap_buffers()
        parts.combine(flat, first, at, op)
        yield
        parts.copy_out(at)


def reduce(shm: StagingMemory, flat: Tensor, op: ReduceOp, root: int) -> Steps:
    """Combine `flat` [n] over the ranks into root's; the others keep theirs."""
    heavy = shm.size > MAX_PIECES_OF_ONE or flat.dtype not in ADDED_AS_THEY_ARE
    share = heavy and flat.nbytes > MAX_BYTES_OF_ONE
    return (reduce_in_parts if share else reduce_at_root)(shm, flat, op, root)


def reduce_at_root(shm: StagingMemory, flat: Tensor, op: ReduceOp, root: int) -> Steps:
    """The root combines everything while the others write the next chunk.

    Cost: one barrier per chunk; the root's work grows with the number of ranks.
    """
    for chunk in _chunks(flat.numel(), CHUNK_BYTES // flat.element_size()):
        mine = flat[chunk]
        in_place = shm.rank == root < 2  # the first two are read before anything is written
        if not in_place:
            copy_bytes(shm.next_addresses()[shm.rank], mine.data_ptr(), mine.nbytes)
        yield
        shm.swap_buffers()
        if shm.rank != root:
            continue
        pieces = shm.pieces(mine.numel(), flat.dtype)
        if in_place:
            pieces = [*pieces[:root], mine, *pieces[root + 1 :]]
        combine_in_rank_order(pieces, op, out=mine)


def reduce_in_parts(shm: StagingMemory, flat: Tensor, op: ReduceOp, root: int) -> Steps:
    """Every rank combines its own part of a chunk, into the first rank's memory, whence the root copies all.

    Cost: two barriers per chunk; the work is shared.
    """
    address, itemsize = flat.data_ptr(), flat.element_size()
    for chunk in _chunks(flat.numel(), CHUNK_BYTES // itemsize):
        numel = chunk.stop - chunk.start
        at = address + chunk.start * itemsize
        parts, result = shm.partition_next(numel, flat.dtype), shm.next_addresses()[0]
        parts.copy_in(at)
        yield
        shm.swap_buffers()
        parts.combine_into_first(flat, chunk.start, op)
        yield
        if shm.rank == root:
            copy_bytes(at, result, numel * itemsize)


def reduce_scatter(
    shm: StagingMemory, parts: Sequence[MemoryRange], own: Tensor, op: ReduceOp, out: Tensor
) -> Steps:
    """Combine everyone's part number `rank` into `out` [n].

    Args:
        shm: the staging memory of the host.
        parts: where this rank's part for each rank lies, `own` [n] for itself; `out` overlaps none of them.
        own: see `parts`.
        op: elementwise combination.
        out: of the same dtype.

    Cost: one barrier per chunk; every rank writes what is for the others and combines what is its own.
    """
    rank, size, itemsize = shm.rank, shm.size, out.element_size()
    for chunk in _chunks(out.numel(), max(1, 2 * CHUNK_BYTES // (itemsize * (size - 1)))):
        first, nbytes = chunk.start * itemsize, (chunk.stop - chunk.start) * itemsize
        address = shm.next_addresses()[rank]
        for slot, (part, _) in enumerate((*parts[rank + 1 :], *parts[:rank])):
            copy_bytes(address + slot * nbytes, part + first, nbytes)
        yield
        shm.swap_buffers()
        starts = _starts_for(rank, size, nbytes)
        pieces = shm.pieces(chunk.stop - chunk.start, out.dtype, starts).copy()
        pieces[rank] = own[chunk]
        combine_in_rank_order(pieces, op, out=out[chunk])


@functools.lru_cache(MAX_CACHED)
def _starts_for(rank: int, size: int, nbytes: int) -> tuple[int, ...]:
    """Return where what is for `rank` begins in everyone's buffer, in slots of `nbytes`."""
    return tuple((rank - src - 1) % size * nbytes if src != rank else 0 for src in range(size))


def reduce_to_owners(
    shm: StagingMemory,
    chunks: Sequence[Sequence[MemoryRange]],
    own: Sequence[Tensor],
    combine: Callable[[int, Sequence[Tensor]], None],
    *,
    in_place: bool,
) -> Steps:
    """Bring what everyone has for a rank to that rank, chunk by chunk; they have their own pace after that.

    All owners work at once: what is written for them and what they combine has about the same size on every
    rank if what they own has.

    Args:
        shm: the staging memory of the host.
        chunks: for each rank what this one has for it, at most `slot_bytes` each; as many on all ranks.
        own: those for this rank.
        combine: called with the number of an own chunk and everyone's [n], in rank order, which are in the
            cache.
        in_place: whether `combine` writes to this rank's own chunk.

    Cost: one barrier per chunk of the rank that owns most; every rank writes what is for the others and
    combines what is its own.
    """
    slot = slot_bytes(shm.size)
    lies_there = not in_place or shm.rank < 2  # the first two are read before anything is written
    starts = (shm.rank * slot,) * shm.size
    for k, of_everyone in enumerate(itertools.zip_longest(*chunks)):
        address = shm.next_addresses()[shm.rank]
        for owner, chunk in enumerate(of_everyone):
            if chunk is not None and not (owner == shm.rank and lies_there):
                copy_bytes(address + owner * slot, *chunk)
        yield
        shm.swap_buffers()
        if k < len(own):
            mine = own[k]
            prefetch(mine)
            pieces = shm.pieces(mine.numel(), mine.dtype, starts)
            if lies_there:
                pieces = [*pieces[: shm.rank], mine, *pieces[shm.rank + 1 :]]
            combine(k, pieces)


def _chunks(numel: int, step: int) -> list[slice]:
    """Cut `numel` elements into chunks of `step`, at least one."""
    return [slice(start, min(numel, start + step)) for start in range(0, max(1, numel), step)]
