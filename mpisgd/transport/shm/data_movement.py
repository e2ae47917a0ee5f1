"""The collectives that move data, as streams through the staging memory of a host.

They yield wherever all ranks of the host must have come (`mpisgd.transport.shm.streams`), and take places in
memory, which the caller keeps: the dtype does not matter. Roots are group ranks. Inputs overlap no output,
unless they are the very place where their copy would go.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mpisgd.transport.shm.streams import Place, Span, copy_bytes, in_a_row, move

if TYPE_CHECKING:
    from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["all_gather", "all_to_all", "all_to_all_equal", "broadcast", "gather", "scatter"]


def broadcast(plane: "ShmTransport", places: Sequence[Place], root: int) -> Iterator[None]:
    """Copy what lies in root's places into everyone's, of the same sizes."""
    row = in_a_row(places, root)
    length = row[-1].start + row[-1].nbytes if row else 0
    gives, takes = (row, []) if plane.rank == root else ([], row)
    return move(plane, gives, takes, length)


def gather(plane: "ShmTransport", outputs: Sequence[Place], mine: Place, root: int) -> Iterator[None]:
    """Copy `mine` of the r-th rank into root's `outputs[r]`, of the same size; no outputs elsewhere."""
    if plane.rank != root:
        yield from move(plane, [_whole(root, mine)], [], mine[1])
        return
    yield from move(plane, [], [_whole(r, place) for r, place in enumerate(outputs) if r != root], mine[1])
    _copy(outputs[root], mine)


def scatter(plane: "ShmTransport", mine: Place, pieces: Sequence[Place], root: int) -> Iterator[None]:
    """Copy root's `pieces[r]` into `mine` of the r-th rank, of the same size; no pieces elsewhere.

    Root's own comes last, so `mine` may lie in what it gives to others.
    """
    nbytes = mine[1]
    length = (plane.size - 1) * nbytes
    if plane.rank == root:
        yield from move(plane, in_a_row([*pieces[root + 1 :], *pieces[:root]], root), [], length)
        _copy(mine, pieces[root])
    else:
        start = (plane.rank - root - 1) % plane.size * nbytes
        yield from move(plane, [], [_whole(root, mine, start)], length)


def all_gather(plane: "ShmTransport", outputs: Sequence[Place], mine: Place) -> Iterator[None]:
    """Copy `mine` of the r-th rank into everyone's `outputs[r]`; sizes may differ by rank."""
    length, takes = 0, []
    for step in range(1, plane.size + 1):  # each begins with another rank's memory and ends with its own
        src = (plane.rank + step) % plane.size
        address, nbytes = outputs[src]
        takes.append(Span(src, 0, address, nbytes))
        length = max(length, nbytes)
    if outputs[plane.rank] == mine:
        takes.pop()
    return move(plane, [_whole(plane.rank, mine)], takes, length)


def all_to_all(
    plane: "ShmTransport", outputs: Sequence[Place], inputs: Sequence[Place], sizes: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Copy `inputs[r]` into `outputs[this rank]` of the r-th rank; `sizes[src][dst]`: in bytes, all known.

    A stream begins with what is for the next rank, so that all ranks have something to take at any time.
    """
    rank, size = plane.rank, plane.size
    streams = [(*row[src + 1 :], *row[:src]) for src, row in enumerate(sizes)]
    takes = []
    for step in range(1, size):
        src = (rank - step) % size
        takes.append(_whole(src, outputs[src], sum(streams[src][: step - 1])))
    gives = in_a_row([*inputs[rank + 1 :], *inputs[:rank]], rank)
    yield from move(plane, gives, takes, max(map(sum, streams)))
    _copy(outputs[rank], inputs[rank])


def all_to_all_equal(plane: "ShmTransport", output: Place, source: Place) -> Iterator[None]:
    """Do `all_to_all` where both are cut into equal pieces, in the same streams."""
    rank, size = plane.rank, plane.size
    (to, nbytes), (address, _) = output, source
    piece = nbytes // size
    before, after = rank * piece, (size - 1 - rank) * piece
    gives = [Span(rank, 0, address + before + piece, after), Span(rank, after, address, before)]
    takes = []
    for step in range(1, size):
        src = (rank - step) % size
        takes.append(Span(src, (step - 1) * piece, to + src * piece, piece))
    yield from move(plane, gives, takes, nbytes - piece)
    copy_bytes(to + before, address + before, piece)


def _whole(rank: int, place: Place, start: int = 0) -> Span:
    """Return the span of all of `place`, at `start` of the stream of `rank`."""
    return Span(rank, start, *place)


def _copy(into: Place, source: Place) -> None:
    """Copy what this rank gives itself, unless it is there already."""
    if into[0] != source[0]:
        copy_bytes(into[0], *source)
