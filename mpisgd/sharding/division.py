"""Where parameters lie in the memory of a host, and which rank updates what: plans as plain data.

Parameters of one kind (optimizer group, dtype, small or large gradient) follow each other in memory, in about
the order of backward. Each rank owns an equal part of all bytes, cut anywhere, in pieces that stay in a
core's cache:

    memory    | W2 ........ | W1 .................... | b3 b2 b1 |
    rank 0    [piece][piece][piece]
    rank 1                  .......[piece][piece][piece][ piece  ]

Optimizers that look at a tensor as a whole (its norm, its factors) get pieces that are whole parameters, each
rank about equally much work.

Where gradients travel bucket by bucket, each bucket is divided by itself, so that all ranks have equally much
to receive of each.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from mpisgd.gradients.bucketing import ALIGN_BYTES
from mpisgd.transport.messages.link import even_ranges

__all__ = ["Item", "Member", "PieceRange", "assign", "divide", "lay_out"]


class Item(NamedTuple):
    """One parameter, as far as its place is concerned.

    Attributes:
        param: its place in the optimizer's list of parameters.
        numel: elements.
        itemsize: bytes of each.
        kind: what lies together: the optimizer's group, the dtype, and whether the parameter shares pieces
        with
            its neighbours (False) or has its own.
        work: what an update of it as a whole takes; its bytes, if that is not known.
    """

    param: int
    numel: int
    itemsize: int
    kind: tuple[int, str, bool]
    work: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes, without padding."""
        return self.numel * self.itemsize


class Member(NamedTuple):
    """The part of one parameter that lies in a piece; all in elements, in the order of memory.

    Attributes:
        param: the place of the parameter in the optimizer's list.
        first: the parameter's first element that is in the piece.
        numel: how many are.
        at: where they begin in the piece.
    """

    param: int
    first: int
    numel: int
    at: int


class PieceRange(NamedTuple):
    """Memory that one rank updates.

    Attributes:
        start: its first byte.
        numel: its elements, with the padding between parameters.
        members: what lies there.
    """

    start: int
    numel: int
    members: tuple[Member, ...]


def lay_out(items: Sequence[Item]) -> tuple[list[Item], list[int], int]:
    """Return the items in the order of memory, the byte at which each begins, and the bytes of all."""
    ordered = sorted(items, key=lambda item: (item.kind, -item.param))
    starts, end = [], 0
    for item in ordered:
        starts.append(end)
        end += -(-item.numel * item.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    return ordered, starts, end


def divide(
    items: Sequence[Item],
    whole: Collection[int],
    size: int,
    piece_bytes: int,
    buckets: Sequence[Collection[int]] = (),
) -> list[list[PieceRange]]:
    """Return the pieces of each of `size` ranks, such that they have about equally much to do.

    Args:
        items: the parameters that lie in one memory.
        whole: indices of those that one rank updates as a whole.
        size: how many ranks there are.
        piece_bytes: most bytes of a piece that is not a whole parameter.
        buckets: indices of the parameters that are divided together; the rest is, too.
    """
    ordered, starts, end = lay_out(items)
    apart = {item.param for item in items if item.param in whole or not item.numel}
    placed = list(zip(ordered, starts, strict=True))
    pieces: list[list[PieceRange]] = [[] for _ in range(size)]
    for bucket in _by_bucket(placed, buckets):
        flat = [(item, at) for item, at in bucket if item.param not in apart]
        for rank, (first, last) in enumerate(_cut_evenly(flat, end, size)):
            for run in _runs(flat):
                pieces[rank] += _pieces(run, first, last, piece_bytes)
    kept = sorted((item, at) for item, at in placed if item.param in apart)
    work = [item.nbytes if item.work is None else item.work for item, _ in kept]
    owners = assign(work, [0] * size)
    for (item, at), owner in zip(kept, owners, strict=True):
        pieces[owner].append(PieceRange(at, item.numel, (Member(item.param, 0, item.numel, 0),)))
    return pieces


def assign(sizes: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Return the owner of each whole parameter, such that the ranks have about equally much to do.

    Args:
        sizes: of the parameters, in bytes, or what their updates take.
        loads: what each rank has already.

    Source: longest processing time first, Graham 1969: at most 4/3 of the best possible largest load, where
    nobody had anything before.
    """
    loads = list(loads)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return owners


Placed = Sequence[tuple[Item, int]]


def _by_bucket(placed: Placed, buckets: Sequence[Collection[int]]) -> list[Placed]:
    """Return the parameters of each bucket, and those of none, in the order of memory."""
    bucket_of = {param: number for number, bucket in enumerate(buckets) for param in bucket}
    parts: list[list[tuple[Item, int]]] = [[] for _ in range(len(buckets) + 1)]
    for item, at in placed:
        parts[bucket_of.get(item.param, len(buckets))].append((item, at))
    return [part for part in parts if part]


def _cut_evenly(flat: Placed, end: int, size: int) -> list[tuple[int, int]]:
    """Return the bytes of memory that each rank owns; what lies between them counts nothing."""
    lines = [(at, -(-item.numel * item.itemsize // ALIGN_BYTES)) for item, at in flat]
    cuts = [first for first, _ in even_ranges(sum(count for _, count in lines), size)]
    bounds, before = [0], 0
    for at, count in lines:
        while len(bounds) < size and cuts[len(bounds)] < before + count:
            bounds.append(at + (cuts[len(bounds)] - before) * ALIGN_BYTES)
        before += count
    bounds += [end] * (size + 1 - len(bounds))
    return [(bounds[rank], bounds[rank + 1]) for rank in range(size)]


def _runs(flat: Placed) -> Iterator[Placed]:
    """Yield the parameters that pieces may join: neighbours of one kind whose gradients travel together."""
    run: list[tuple[Item, int]] = []
    for item, at in flat:
        if run and (item.kind[2] or item.kind != run[-1][0].kind or at != _end(*run[-1])):
            yield run
            run = []
        run.append((item, at))
    if run:
        yield run


def _end(item: Item, at: int) -> int:
    return at + -(-item.numel * item.itemsize // ALIGN_BYTES) * ALIGN_BYTES


def _pieces(run: Placed, first: int, last: int, piece_bytes: int) -> Iterator[PieceRange]:
    """Yield the pieces of a run that lie between two bytes."""
    start, stop = max(first, run[0][1]), min(last, run[-1][1] + run[-1][0].numel * run[-1][0].itemsize)
    step = max(ALIGN_BYTES, piece_bytes // ALIGN_BYTES * ALIGN_BYTES)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        members = tuple(_members(run, begin, end))
        if members:  # a cut may fall between the last element and the end of its cache line
            yield PieceRange(begin, members[-1].at + members[-1].numel, members)


def _members(run: Placed, begin: int, end: int) -> Iterator[Member]:
    for item, at in run:
        low, high = max(begin, at), min(end, at + item.numel * item.itemsize)
        if low < high:
            size = item.itemsize
            yield Member(item.param, (low - at) // size, (high - low) // size, (low - begin) // size)
