"""Streams as data, and the collectives that are made of them, played by several ranks in one process."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.memory_ranges import Span, consecutive_spans, equal_ranges, range_of
from mpisgd.transport.shm import data_movement, reduction
from mpisgd.transport.shm.staging import cut

STEP = 16


class FakeStaging:
    """Staging memory of one rank, as `ShmTransport` has it; all ranks lie in this process."""

    def __init__(self, rank: int, buffers: list[list[Tensor]]) -> None:
        self.rank = rank
        self.size = len(buffers[0])
        self._addresses = [[buffer.data_ptr() for buffer in side] for side in buffers]
        self._turn = 0

    def next_addresses(self) -> list[int]:
        return self._addresses[self._turn ^ 1]

    def swap_buffers(self) -> None:
        self._turn ^= 1


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(data_movement, "CHUNK_BYTES", STEP)


def play(size: int, program: Callable[[FakeStaging], Iterator[None]], seed: int = 0) -> None:
    """Let every rank go on to its next barrier, in an order that changes from one to the next."""
    buffers = [[torch.zeros(STEP, dtype=torch.uint8) for _ in range(size)] for _ in range(2)]
    running = [program(FakeStaging(rank, buffers)) for rank in range(size)]
    order = random.Random(seed)
    ended: set[bool] = {False}
    while ended == {False}:
        ranks = order.sample(range(size), size)
        ended = {next(running[rank], running) is running for rank in ranks}
    assert ended == {True}, "some ranks have more barriers than others"


def value(*key: int, numel: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(key).integers(1, 256, numel, dtype=np.uint8))


SIZES = [0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP + 5]
several = pytest.mark.parametrize(("ranks", "numel"), list(itertools.product([2, 3, 5], SIZES)))


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_cutting_loses_nothing_and_leaves_everything_in_its_place(lengths, step):
    source = value(1, numel=sum(lengths))
    places = [range_of(piece) for piece in source.split(lengths)] if lengths else []
    stream = bytearray()
    for chunk in cut(consecutive_spans(places, 0), source.numel(), step):
        assert all(start >= 0 and start + nbytes <= step for _, start, _, nbytes in chunk)
        for _, start, address, nbytes in chunk:
            assert len(stream) % step == start or not nbytes
            stream += ctypes.string_at(address, nbytes)
    assert bytes(stream) == bytes(source.tolist())


def test_cut_gives_one_chunk_of_nothing():
    assert [list(chunk) for chunk in cut([], 0, STEP)] == [[]]


def test_spans_of_several_streams_are_cut_side_by_side():
    spans = [Span(0, 0, 1000, 5), Span(1, 2, 2000, 5)]
    assert [list(chunk) for chunk in cut(spans, 8, 4)] == [
        [(0, 0, 1000, 4), (1, 2, 2000, 2)],
        [(0, 0, 1004, 1), (1, 0, 2002, 3)],
    ]


@several
def test_broadcast(ranks, numel):
    for root in range(ranks):
        made = {rank: [value(rank, i, numel=numel + i) for i in range(2)] for rank in range(ranks)}
        sources = {rank: list(map(range_of, tensors)) for rank, tensors in made.items()}
        play(ranks, lambda shm: data_movement.broadcast(shm, sources[shm.rank], root), root)  # noqa: B023
        for mine, i in itertools.product(made.values(), range(2)):
            assert torch.equal(mine[i], value(root, i, numel=numel + i))


@several
def test_gather_and_scatter_are_inverse(ranks, numel):
    for root in range(ranks):
        gathered = torch.zeros(ranks * numel, dtype=torch.uint8)
        given_ = [value(rank, numel=numel) for rank in range(ranks)]
        taken = [torch.zeros(numel, dtype=torch.uint8) for _ in range(ranks)]

        def program(shm, root=root, gathered=gathered, given_=given_, taken=taken):
            places = equal_ranges(gathered, ranks) if shm.rank == root else []
            yield from data_movement.gather(shm, places, range_of(given_[shm.rank]), root)
            yield from data_movement.scatter(shm, range_of(taken[shm.rank]), places, root)

        play(ranks, program, root)
        assert torch.equal(gathered, torch.cat(given_))
        for mine, wanted in zip(taken, given_, strict=True):
            assert torch.equal(mine, wanted)


@several
def test_all_gather_of_different_lengths(ranks, numel):
    given_ = [value(rank, numel=numel + rank) for rank in range(ranks)]
    taken = [[torch.zeros_like(mine) for mine in given_] for _ in range(ranks)]

    def program(shm):
        return data_movement.all_gather(shm, list(map(range_of, taken[shm.rank])), range_of(given_[shm.rank]))

    play(ranks, program)
    for outputs in taken:
        assert torch.equal(torch.cat(outputs), torch.cat(given_))


@several
def test_all_gather_in_place(ranks, numel):
    made = [torch.zeros(ranks, numel, dtype=torch.uint8) for _ in range(ranks)]
    for rank, mine in enumerate(made):
        mine[rank] = value(rank, numel=numel)
    play(
        ranks,
        lambda shm: data_movement.all_gather(
            shm, equal_ranges(made[shm.rank], ranks), range_of(made[shm.rank][shm.rank])
        ),
    )
    for mine in made:
        assert torch.equal(mine, torch.stack([value(rank, numel=numel) for rank in range(ranks)]))


@several
def test_equal_all_to_all_is_a_transpose(ranks, numel):
    given_ = [value(rank, numel=ranks * numel) for rank in range(ranks)]
    taken = [torch.zeros_like(mine) for mine in given_]
    play(
        ranks,
        lambda shm: data_movement.all_to_all_equal(
            shm, range_of(taken[shm.rank]), range_of(given_[shm.rank])
        ),
    )
    transposed = torch.stack(given_).view(ranks, ranks, numel).transpose(0, 1)
    assert torch.equal(torch.stack(taken), transposed.reshape(ranks, -1))


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_all_to_all_of_any_sizes(sizes, seed):
    ranks = len(sizes)
    given_ = [[value(src, dst, numel=sizes[src][dst]) for dst in range(ranks)] for src in range(ranks)]
    taken = [
        [torch.zeros(sizes[src][dst], dtype=torch.uint8) for src in range(ranks)] for dst in range(ranks)
    ]

    def program(shm):
        for _ in range(2):  # the second begins before others have taken the end of the first
            outputs, inputs = ([range_of(t) for t in row[shm.rank]] for row in (taken, given_))
            yield from data_movement.all_to_all(shm, outputs, inputs, sizes)

    play(ranks, program, seed)
    for src, dst in itertools.product(range(ranks), range(ranks)):
        assert torch.equal(taken[dst][src], given_[src][dst])


@pytest.mark.parametrize(
    ("ranks", "dtype", "numel", "wanted"),
    [
        (2, torch.float32, 2**22, "reduce_at_root"),
        (8, torch.float32, 2**22, "reduce_in_parts"),
        (2, torch.bfloat16, 2**22, "reduce_in_parts"),
        (8, torch.bfloat16, 2**4, "reduce_at_root"),
    ],
)
def test_a_reduction_is_shared_where_it_is_much_work_for_one(ranks, dtype, numel, wanted):
    shm = FakeStaging(0, [[torch.zeros(1)] * ranks] * 2)
    steps = reduction.reduce(shm, torch.empty(numel, dtype=dtype), ReduceOp.SUM, 0)
    assert steps.__name__ == wanted
