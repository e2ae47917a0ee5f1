"""An operation comes after what produces its tensors, and before what uses them, on whatever streams."""

from __future__ import annotations

import time

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from late_tensors import CYCLES, N, late_ones, total

import mpisgd


@pytest.fixture
def side() -> gpu.Stream:
    return gpu.Stream()


@pytest.mark.parametrize("algorithm", ["auto", "mpi"])
def test_a_blocking_operation_on_a_side_stream(side, algorithm):
    tensor = late_ones(side)
    with gpu.stream(side):
        mpisgd.all_reduce(tensor, algorithm=algorithm)
        doubled = tensor * 2
    other = gpu.Stream()
    other.wait_stream(side)
    with gpu.stream(other):
        seen = doubled + 1
    other.synchronize()
    assert (seen == 2 * total() + 1).all()


@pytest.mark.parametrize("algorithm", ["auto", "mpi"])
def test_an_asynchronous_operation_is_used_on_another_stream(side, algorithm):
    tensor = late_ones(side)
    with gpu.stream(side):
        work = mpisgd.all_reduce(tensor, async_op=True, algorithm=algorithm)
    other = gpu.Stream()
    with gpu.stream(other):
        work.wait()
        seen = tensor * 3
    other.synchronize()
    assert (seen == 3 * total()).all()


def test_nobody_waits_for_the_whole_device(side):
    """A kernel that has nothing to do with it is still at work when the operation is over."""
    tensor = torch.full((N,), mpisgd.rank() + 1.0, device=DEVICE)
    mpisgd.all_reduce(torch.zeros(1, device=DEVICE))  # what is opened at the first time may take its time
    gpu.synchronize()
    with gpu.stream(side):
        gpu._sleep(40 * CYCLES)
    mpisgd.all_reduce(tensor, algorithm="mpi")
    assert not side.query()
    side.synchronize()
    assert (tensor == total()).all()


def test_nccl_returns_before_the_gpu_is_there(side, expected_way):
    if expected_way != "nccl":
        pytest.skip("through host memory the host has to wait")
    tensor = late_ones(side)
    started = time.monotonic()
    with gpu.stream(side):
        mpisgd.all_reduce(tensor)
    assert not side.query(), f"returned after {time.monotonic() - started} s"
    side.synchronize()
    assert (tensor == total()).all()


def test_a_wait_that_ends_early_changes_nothing(side):
    tensor = late_ones(side)
    with gpu.stream(side):
        gpu._sleep(10 * CYCLES)
        work = mpisgd.all_reduce(tensor, async_op=True)
        with pytest.raises(mpisgd.CollectiveTimeout, match=r"not done after 0\.05 s"):
            work.wait(0.05)
        work.wait()
    side.synchronize()
    assert (tensor == total()).all()
