"""`join`: ranks whose data is used up take part with what changes nothing, until all are there."""

from __future__ import annotations

import copy

import pytest
import torch
from closed_form import given
from reductions import near, wanted
from torch import nn
from verdicts import everyone, same_on_all_ranks

import mpisgd.horovod as hvd
from mpisgd.collectives.algorithms.adasum import adasum

F64 = torch.float64


def num_steps(rank: int) -> int:
    """Ranks have different amounts of data; the last one has most, the first none."""
    return 2 * rank


def active(step: int) -> list[int]:
    """The ranks that have data for a step."""
    return [rank for rank in range(hvd.size()) if step < num_steps(rank)]


def uneven(step_of) -> None:
    """Run `step_of(step, ranks that have data)` as long as this rank has data, and join."""
    for step in range(num_steps(hvd.rank())):
        step_of(step, active(step))
    everyone(hvd.join() == hvd.size() - 1, "somebody else was last")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def with_neutral(tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    """One tensor per rank: those that have joined give what changes nothing."""
    dtype = tensors[0].dtype
    if op in ("Min", "Max"):
        return tensors
    missing = torch.full_like(tensors[0], op == "Product", dtype=dtype)
    return [*tensors, *[missing] * (hvd.size() - len(tensors))]


@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_reductions_of_every_kind_of_dtype(op):
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    if op != "Average":
        dtypes.append(torch.bool)

    def step_of(step, ranks):
        handles = [
            hvd.allreduce_async(given(hvd.rank(), dtype, (step + 2,)), name=f"{dtype}", op=getattr(hvd, op))
            for dtype in dtypes
        ]
        for dtype, handle in zip(dtypes, handles, strict=True):
            theirs = [given(rank, dtype, (step + 2,)) for rank in ranks]
            near(hvd.synchronize(handle), wanted(op, with_neutral(theirs, op)))

    uneven(step_of)


def test_several_at_once_factors_and_complex_numbers():
    def step_of(step, ranks):
        tensors = [given(hvd.rank(), torch.complex64, (3,)), given(hvd.rank(), F64, (2, 2))]
        results = hvd.grouped_allreduce_(tensors, name="several", op=hvd.Sum, prescale_factor=0.5)
        for result, dtype, shape in zip(results, (torch.complex64, F64), ((3,), (2, 2)), strict=True):
            near(result, sum(given(rank, dtype, shape) for rank in ranks) * 0.5)

    uneven(step_of)


def test_barrier():
    uneven(lambda step, ranks: hvd.barrier())


def test_adasum():
    def step_of(step, ranks):
        theirs = [given(rank, F64) * (rank in ranks) for rank in range(hvd.size())]
        near(hvd.allreduce(given(hvd.rank(), F64), name="x", op=hvd.Adasum), adasum(theirs))

    uneven(step_of)


NEED_EVERYONE = {
    "allgather": lambda: hvd.allgather(torch.ones(2), name="x"),
    "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size()), name="x"),
    "broadcast": lambda: hvd.broadcast(torch.ones(1), 1, name="x"),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(hvd.size()), name="x"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", NEED_EVERYONE)
def test_what_is_no_reduction_is_an_error_for_the_others(operation):
    """As in Horovod, whose programs wait for the error."""
    said = f"'x': {operation.capitalize()} is not supported with Join at this time.*rank 0 has joined"
    if hvd.rank() == 0:
        last = hvd.join()
    else:
        hvd.allreduce(torch.ones(1), name="rank 0 has joined")
        with pytest.raises(hvd.HorovodInternalError, match=said):
            NEED_EVERYONE[operation]()
        hvd.allreduce(torch.ones(1), name="nobody joins before that")
        last = hvd.join()
    same_on_all_ranks(last)
    everyone(last > 0)


@pytest.mark.mpi(min_size=3)
def test_a_mismatch_among_those_that_have_not_joined():
    if hvd.rank() > 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"mismatched shape: rank 1 gave \[1\]"):
            hvd.allreduce(torch.ones(hvd.rank()), name="x")
    same_on_all_ranks(hvd.join())


@pytest.mark.parametrize("last", [0, -1])
def test_the_last_rank_and_what_was_submitted_before_joining(last):
    """Joining with operations under way is no reason for them to be lost."""
    last %= hvd.size()
    handle = hvd.allreduce_async(torch.ones(1), name="before", op=hvd.Sum)
    if hvd.rank() == last:
        hvd.allreduce(torch.ones(1), name="the others have joined")
    everyone(hvd.join() == last, "somebody else was last")
    assert hvd.synchronize(handle).item() == hvd.size()


def test_nobody_has_anything_left():
    for _ in range(3):
        same_on_all_ranks(hvd.join(-1))


def test_process_sets_go_on_beside_a_rank_that_has_joined():
    if hvd.size() == 1:
        return
    last = hvd.size() - 1
    alone = hvd.add_process_set([last])
    if hvd.rank() == last:
        hvd.allreduce(torch.ones(1), name="the others have joined")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=alone).item() == 1
    assert hvd.join() == last
    hvd.remove_process_set(alone)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("passes", [1, 2])
def test_training_on_uneven_data(passes):
    """Those without data give zero gradients; who has most data ends with the right model."""
    batches = [
        [given(10 * rank + step, F64, (3, 4)) / 7 for step in range(num_steps(rank))]
        for rank in range(hvd.size())
    ]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = copy.deepcopy(plain)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        backward_passes_per_step=passes,
    )
    mine = batches[hvd.rank()]
    for start in range(0, len(mine), passes):
        opt.zero_grad()
        for inputs in mine[start : start + passes]:
            model(inputs).square().sum().backward()
        opt.step()
    assert hvd.join() == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, 2 * (hvd.size() - 1), passes):
        reference.zero_grad()
        for theirs in batches:
            for inputs in theirs[start : start + passes]:
                (plain(inputs).square().sum() / hvd.size()).backward()
        reference.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        near(a.detach(), b.detach())


def test_operations_without_a_name_meet_again_after_a_join():
    for _ in range(hvd.rank()):
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
    hvd.join()
    everyone(hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size())
