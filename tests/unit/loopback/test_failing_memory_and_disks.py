"""Allocations of shared memory and writes of checkpoints that fail: the same outcome on all ranks."""

from __future__ import annotations

import warnings

import pytest
import torch

import mpisgd
from mpisgd import checkpoint
from mpisgd.job.lifecycle import world
from mpisgd.job.threads_as_ranks import Fault, run_ranks


@pytest.fixture(autouse=True)
def _no_warning_of_slower_transports():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*share a host but no memory", RuntimeWarning)
        yield


def sums(group: mpisgd.Group | None = None) -> None:
    size = mpisgd.size()
    for numel in (3, 100_000):
        tensor = torch.full((numel,), mpisgd.rank() + 1.0)
        mpisgd.all_reduce(tensor, group=group)
        assert tensor.eq(size * (size + 1) / 2).all()


def share_parameters() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpisgd.DistributedOptimizer(inner, share_parameters=True)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def open_window() -> None:
    if world().shared_memory is not None:  # else by MPI's windows
        mpisgd.Window(torch.zeros(4)).free()


@pytest.mark.parametrize("hosts", [(3,), (2, 1), (1, 2)])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lasts", [0, 99])
def test_an_allocation_that_fails_is_the_same_on_all_ranks_and_operations_go_on(hosts, rank, lasts):
    def program():
        outcome = []
        for use in (sums, lambda: sums(mpisgd.new_group([2, 1, 0])), share_parameters, open_window):
            try:
                use()
            except MemoryError as exc:
                outcome.append(str(exc))
            sums()
        return outcome

    seen = set()
    for at in range(1, 10):
        outcomes = run_ranks(
            3, program, seed=at, ranks_per_host=hosts, faults=[Fault("allocate", rank, at, lasts)]
        )
        assert outcomes == [outcomes[0]] * 3
        seen.add(str(outcomes[0]))
    assert len(seen) > 1 or (rank == 0 and hosts == (1, 2))  # who is alone on its host allocates nothing


FAULTS = [
    Fault(kind, 0, at, lasts=99 if kind == "write" else 0, is_short=is_short)
    for kind, numbers in (("write", (1, 2, 3)), ("fsync", (1, 2)), ("rename", (1,)))
    for at in numbers
    for is_short in ([False, True] if kind == "write" else [False])
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_that_cannot_be_written_is_told_to_all_ranks_and_harms_no_other(
    tmp_path, fault, in_background
):
    def save(step: int, value: torch.Tensor) -> None:
        if in_background:
            with checkpoint.Writer(tmp_path) as writer:
                writer.save(step, value=value)
        else:
            checkpoint.save(tmp_path, step, value=value)

    def program():
        value = torch.arange(50_000.0)
        save(1, value)
        with pytest.raises(mpisgd.CheckpointError, match=r"No space left|Input/output error"):
            save(2, value + 1)
        sums()
        loaded = checkpoint.load(tmp_path)
        step = loaded.step
        assert loaded["value"].equal(value + (step - 1))
        return step

    def first():
        save(1, torch.arange(50_000.0))

    # The first checkpoint takes some of each kind; what fails is of the second one.
    late = fault._replace(at=num_points(fault.kind, first) + fault.at)
    steps = run_ranks(2, program, faults=[late])
    assert steps in ([1, 1], [2, 2])
    assert steps == [1, 1] or fault == Fault(
        "fsync", 0, 2
    )  # the file is there, its name may not be on the disk
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def num_points(kind: str, program) -> int:
    """Return how many fault points of a kind rank 0 comes to."""
    number = 1
    while True:
        try:
            run_ranks(2, program, faults=[Fault(kind, 0, number)])
        except Exception:
            number += 1
        else:
            return number - 1
