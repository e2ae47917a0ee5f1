"""The collectives that move data, as streams of bytes through the double-buffered staging memory of a host.

Every rank writes one stream, of any length, through its staging buffers; every rank copies what it wants from
the streams. What goes where is data (`Span`s), so one loop does all the copying. The streams go in chunks
that stay in cache, and the two buffers of a rank are used in turn: while others still read chunk k from one,
chunk k + 1 is written into the other, so one barrier per chunk is enough.

    rank 0   write(0) | read(0) write(1) | read(1) write(2) | ...
    rank 1   write(0) | read(0) write(1) | read(1) write(2) | ...
    buffer      0          0       1          1       0

The generators yield wherever all ranks of the host must have arrived. The first of these points can be the
consistency check of the operation, so that a message of one chunk needs nothing else; the others are
barriers. They take ranges of memory, which the caller keeps: the dtype does not matter. Roots are group
ranks. Inputs overlap no output, unless they are the very range that their copy would go to.
"""

from collections.abc import Sequence

from mpisgd.interfaces.host_transport import Steps
from mpisgd.memory_ranges import MemoryRange, Span, consecutive_spans
from mpisgd.transport.shm.staging import copy_bytes, cut
from mpisgd.transport.shm.staging_memory import StagingMemory
from mpisgd.transport.staging_layout import CHUNK_BYTES

__all__ = ["all_gather", "all_to_all", "all_to_all_equal", "broadcast", "exchange_spans", "gather", "scatter"]


def exchange_spans(shm: StagingMemory, sends: Sequence[Span], receives: Sequence[Span], length: int) -> Steps:
    """Write this rank's stream and read from all of them; yields wherever all ranks must have arrived.

    The caller keeps the memory that the spans describe. What is received must not overwrite bytes that are
    still to be sent, unless they are those very bytes.

    Args:
        shm: the staging memory of this host.
        sends: this rank's stream.
        receives: what it wants of the streams.
        length: of the longest stream, in bytes; the same on all ranks.

    Cost: two passes over the bytes, one of them in cache; a barrier per chunk.
    """
    chunks = zip(cut(sends, length, CHUNK_BYTES), cut(receives, length, CHUNK_BYTES), strict=True)
    for written, read in chunks:
        addresses = shm.next_addresses()
        mine = addresses[shm.rank]
        for _, start, address, nbytes in written:
            copy_bytes(mine + start, address, nbytes)
        yield
        shm.swap_buffers()
        for rank, start, address, nbytes in read:
            copy_bytes(address, addresses[rank] + start, nbytes)


def broadcast(shm: StagingMemory, ranges: Sequence[MemoryRange], root: int) -> Steps:
    """Copy what lies in root's ranges into everyone's, of the same sizes."""
    spans = consecutive_spans(ranges, root)
    length = spans[-1].start + spans[-1].nbytes if spans else 0
    sends, receives = (spans, []) if shm.rank == root else ([], spans)
    return exchange_spans(shm, sends, receives, length)


def gather(shm: StagingMemory, outputs: Sequence[MemoryRange], mine: MemoryRange, root: int) -> Steps:
    """Copy `mine` of the r-th rank into root's `outputs[r]`, of the same size; no outputs elsewhere."""
    if shm.rank != root:
        yield from exchange_spans(shm, [_whole(root, mine)], [], mine[1])
        return
    receives = [_whole(r, output) for r, output in enumerate(outputs) if r != root]
    yield from exchange_spans(shm, [], receives, mine[1])
    _copy(outputs[root], mine)


def scatter(shm: StagingMemory, mine: MemoryRange, pieces: Sequence[MemoryRange], root: int) -> Steps:
    """Copy root's `pieces[r]` into `mine` of the r-th rank, of the same size; no pieces elsewhere.

    Root's own comes last, so `mine` may lie in what it sends to others.
    """
    nbytes = mine[1]
    length = (shm.size - 1) * nbytes
    if shm.rank == root:
        sends = consecutive_spans([*pieces[root + 1 :], *pieces[:root]], root)
        yield from exchange_spans(shm, sends, [], length)
        _copy(mine, pieces[root])
    else:
        start = (shm.rank - root - 1) % shm.size * nbytes
        yield from exchange_spans(shm, [], [_whole(root, mine, start)], length)


def all_gather(shm: StagingMemory, outputs: Sequence[MemoryRange], mine: MemoryRange) -> Steps:
    """Copy `mine` of the r-th rank into everyone's `outputs[r]`; sizes may differ by rank."""
    # Each rank begins with another one's memory and ends with its own.
    receives = [_whole(src, outputs[src]) for src in (*range(shm.rank + 1, shm.size), *range(shm.rank + 1))]
    if outputs[shm.rank] == mine:
        receives.pop()
    return exchange_spans(shm, [_whole(shm.rank, mine)], receives, max(nbytes for _, nbytes in outputs))


def all_to_all(
    shm: StagingMemory,
    outputs: Sequence[MemoryRange],
    inputs: Sequence[MemoryRange],
    sizes: Sequence[Sequence[int]],
) -> Steps:
    """Copy `inputs[r]` into `outputs[this rank]` of the r-th rank; `sizes[src][dst]`: in bytes, all known.

    A stream begins with what is for the next rank, so that all ranks have something to read at any time.
    """
    rank, size = shm.rank, shm.size
    streams = [(*row[src + 1 :], *row[:src]) for src, row in enumerate(sizes)]
    receives = []
    for step in range(1, size):
        src = (rank - step) % size
        receives.append(_whole(src, outputs[src], sum(streams[src][: step - 1])))
    sends = consecutive_spans([*inputs[rank + 1 :], *inputs[:rank]], rank)
    yield from exchange_spans(shm, sends, receives, max(map(sum, streams)))
    _copy(outputs[rank], inputs[rank])


def all_to_all_equal(shm: StagingMemory, output: MemoryRange, source: MemoryRange) -> Steps:
    """Do `all_to_all` where both are cut into equal pieces, in the same streams."""
    rank, size = shm.rank, shm.size
    (to, nbytes), (address, _) = output, source
    piece = nbytes // size
    before, after = rank * piece, (size - 1 - rank) * piece
    sends = [Span(rank, 0, address + before + piece, after), Span(rank, after, address, before)]
    receives = []
    for step in range(1, size):
        src = (rank - step) % size
        receives.append(Span(src, (step - 1) * piece, to + src * piece, piece))
    yield from exchange_spans(shm, sends, receives, nbytes - piece)
    copy_bytes(to + before, address + before, piece)


def _whole(rank: int, memory: MemoryRange, start: int = 0) -> Span:
    """Return the span of all of `memory`, at `start` of the stream of `rank`."""
    return Span(rank, start, *memory)


def _copy(into: MemoryRange, source: MemoryRange) -> None:
    """Copy what this rank sends to itself, unless it is there already."""
    if into[0] != source[0]:
        copy_bytes(into[0], *source)
