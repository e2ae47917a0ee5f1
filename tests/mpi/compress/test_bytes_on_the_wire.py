"""What reducers say they send is what was handed to mpi4py, where the ranks have nothing but messages."""

from __future__ import annotations

import pytest
import torch
from examples import example
from verdicts import everyone

import mpisgd
from mpisgd import Compression, ReduceOp, compress, config
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.core.consistency import Operation

NUMEL = 2520  # divides evenly among up to 10 ranks


@pytest.fixture
def group(monkeypatch):
    """All ranks, without shared memory."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    return mpisgd.new_group()


def reduce(reducer, group, dtype) -> dict[str, int]:
    """What this rank has handed to mpi4py for one bucket: to sends, and to each collective."""
    communicator = group.queue.communicator
    before, given = communicator.sent_bytes, dict(communicator.given_bytes)
    bucket = torch.arange(NUMEL, dtype=dtype) + group.rank
    group.queue.run(Operation("a bucket"), lambda: reducer.reduce(bucket, group, ReduceOp.AVG))
    found = {name: count - given.get(name, 0) for name, count in communicator.given_bytes.items()}
    return {"sends": communicator.sent_bytes - before, **found}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_send_halves(group, compression, dtype):
    reducer = compression.reducer(BucketLayout((torch.Size([NUMEL]),), dtype))
    sent = reduce(reducer, group, dtype)["sends"]
    everyone(
        sent == reducer.bytes_on_the_wire(group.size) == 2 * (group.size - 1) * NUMEL * 2 // group.size,
        f"{sent}",
    )


@pytest.mark.mpi(min_size=2)
def test_a_plain_sum_gives_the_bucket_to_mpi(group):
    reducer = SumReducer(NUMEL * 4)
    given = reduce(reducer, group, torch.float32)["Allreduce"]
    everyone(reducer.bytes_on_the_wire(group.size) == 2 * (group.size - 1) * given // group.size, f"{given}")


@pytest.mark.mpi(min_size=2)
def test_the_documented_compressor_sends_signs_and_a_magnitude(group):
    reducer = example("compressor")["Signs"]().reducer(BucketLayout((torch.Size([NUMEL]),), torch.float32))
    given = reduce(reducer, group, torch.float32)["Allgather"]
    everyone(given == NUMEL + 4, f"{given}")
    everyone(reducer.bytes_on_the_wire(group.size) == (group.size - 1) * given)


MATRIX = BucketLayout((torch.Size([42, 50]), torch.Size([420])), torch.float32)  # NUMEL in all


def block_code(size: int, bits: int, block: int) -> int:
    """Bytes of a chunk of which the first one of `MATRIX` has one piece or two."""
    chunk = -(-NUMEL // (64 * size)) * 64
    return chunk * bits // 8 + (chunk // block + 1 + (size == 1 or 42 * 50 % chunk > 0)) * 4


def chunk_code(count: int, places: int, bits: int) -> int:
    """Bytes of so many elements: of their places 8 bits, and what there is more, and codes."""
    return sum(-(-count * each // 8) for each in (min(8, places), max(0, places - 8), bits))


def on_the_wire(given: dict[str, int], size: int) -> int:
    """What a rank sends of what mpi4py was given."""
    reduced = 2 * (size - 1) * given.get("Allreduce", 0) // size
    dealt = (size - 1) * given.get("Alltoall", 0) // size
    return given["sends"] + (size - 1) * given.get("Allgather", 0) + reduced + dealt


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("method", "formula"),
    [  # of the number of ranks
        (compress.TopK(0.01), lambda size: (size - 1) * 2 * (21 + 4) * 4),  # 2 k words
        (compress.DeepGradient(0.01), lambda size: (size - 1) * 2 * (21 + 4) * 4),
        (compress.RandomK(0.1), lambda size: 2 * (size - 1) * 252 * 4 // size),
        (compress.TopK(1.0), lambda size: 2 * (size - 1) * NUMEL * 4 // size),
        (compress.QSGD(4), lambda size: (size - 1) * (NUMEL // 2 + (5 + 1) * 4)),
        # To owners of chunks and back: codes, and a scale for each block of one and for each piece.
        (compress.BlockQuantized(bits=4), lambda size: 2 * (size - 1) * block_code(size, 4, 256)),
        (compress.BlockQuantized(bits=8, block=32), lambda size: 2 * (size - 1) * block_code(size, 8, 32)),
        # In each chunk 12 + 2 bits of 64 of 4096 elements, and two bounds; all of the rest is shorter.
        (compress.ChunkTopK(), lambda size: (size - 1) * (chunk_code(33 + 7, 12, 2) + 2 * 8)),
        (
            compress.ChunkTopK(keep=4, chunk=100, bits=3),
            lambda size: (size - 1) * (chunk_code(21 * 4 + 4 * 4 + 1, 7, 3) + 26 * 8),
        ),
        (compress.TernGrad(), lambda size: (size - 1) * (NUMEL // 4 + 2 * 4)),
        (compress.Natural(), lambda size: (size - 1) * NUMEL * 9 // 8),
    ],
    ids=repr,
)
def test_methods_send_what_their_formulas_say(group, method, formula):
    reducer = method.reducer(MATRIX)
    before = reducer.bytes_on_the_wire(group.size)
    given = reduce(reducer, group, torch.float32)
    after = reducer.bytes_on_the_wire(group.size)
    sent, said = on_the_wire(given, group.size), formula(group.size)
    everyone(before == after == sent == said, f"{before}, {after}, {given}; expected {said}")


@pytest.mark.mpi(min_size=2)
def test_powersgd_sends_r_times_n_plus_m_in_two_all_reduces(group):
    reducer = compress.PowerSGD(2, warmup_steps=1).reducer(MATRIX)
    words = [NUMEL, 2 * (42 + 50) + 420]  # in the warm-up, and later; what is no matrix is in both
    for count in words:
        calls = group.queue.communicator.calls["Allreduce"]
        given = reduce(reducer, group, torch.float32)
        calls = group.queue.communicator.calls["Allreduce"] - calls
        everyone(given["Allreduce"] == 4 * count, f"{given}, {count}")
        everyone(calls == (1 if count == NUMEL else 2), f"{calls}")
        # Each all-reduce rounds its share down.
        off = reducer.bytes_on_the_wire(group.size) - on_the_wire(given, group.size)
        everyone(-1 <= off <= 0, f"{off}")


@pytest.mark.mpi(min_size=2)
def test_a_threshold_tells_what_its_last_step_has_sent(group):
    reducer = compress.Threshold(2400.0).reducer(MATRIX)  # the bucket of rank r begins with r
    everyone(reducer.bytes_on_the_wire(group.size) == 0)
    given = reduce(reducer, group, torch.float32)
    passing = NUMEL + group.rank - 2400
    expected = (group.size - 1) * (8 + 8 * passing)
    sent = on_the_wire(given, group.size)
    everyone(reducer.bytes_on_the_wire(group.size) == sent == expected, f"{given}, {expected}")
