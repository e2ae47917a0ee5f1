"""What reducers say they send is what was handed to mpi4py, where the ranks have nothing but messages."""

from __future__ import annotations

import pytest
import torch
from examples import example
from verdicts import everyone

import mpisgd
from mpisgd import Compression, ReduceOp, config
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
