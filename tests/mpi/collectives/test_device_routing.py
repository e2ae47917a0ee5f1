"""Tensors of a pretended GPU: every collective, by each of the transports there are, as it is for the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import test_collectives as plain
import torch
from closed_form import assert_near, combined, given
from devices import EagerDevice
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import ReduceOp
from mpisgd.accelerator.runtime import set_runtime
from mpisgd.job.groups import close_group
from mpisgd.job.lifecycle import current_job
from mpisgd.transport.device import transport as device_transport

# What NCCL and MPI add, what they only move, and what takes another transport.
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
TRANSPORTS = {
    "pinned host memory": ("auto", {}),
    "nccl": ("auto", {"nccl": True}),
    "cuda-aware mpi": ("mpi", {}),
}
BODIES = [
    plain.test_all_reduce_combines_all_inputs,
    plain.test_reduce_changes_the_destination_only,
    plain.test_reduce_scatter_leaves_each_rank_its_part,
    plain.test_broadcast_gives_everyone_the_tensor_of_src,
    plain.test_gather_fills_the_list_of_the_destination,
    plain.test_scatter_hands_out_the_list_of_src,
    plain.test_all_gather_gives_everyone_everything,
    plain.test_all_to_all_is_a_transpose,
    plain.test_all_to_all_takes_uneven_pieces,
    plain.test_coalesced_equals_one_by_one,
    plain.test_coalesced_gather_and_scatter_equal_one_by_one,
]


@pytest.fixture
def device(request) -> Any:
    """The stand-in, in the place of CUDA during one test."""
    stand_in = EagerDevice(**getattr(request, "param", {}))
    set_runtime(stand_in)
    yield stand_in
    set_runtime(None)


def opened(wanted: str, *, ranks: Any = None) -> mpisgd.Group:
    """A group on which a first tensor of the GPU has travelled."""
    group = mpisgd.new_group(ranks)
    before, current_job().gpu = current_job().gpu, wanted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            mpisgd.all_reduce(torch.zeros(1), group=group)
        finally:
            current_job().gpu = before
    return group


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request, job) -> Any:
    wanted, options = TRANSPORTS[request.param]
    stand_in = EagerDevice(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_transport, "is_cuda_aware", lambda: True)
        set_runtime(stand_in)
        group = opened(wanted)
        set_runtime(None)
    assert group.device.selection.name == request.param
    yield stand_in, group
    close_group(group)


@pytest.fixture
def group(transport) -> Any:
    set_runtime(transport[0])
    yield transport[1]
    set_runtime(None)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_collectives_on_a_device_as_on_the_cpu(group, body):
    for dtype in DTYPES:
        body(group, dtype)


def test_layouts_travel_in_logical_order(group):
    mine = given(group.rank, torch.float32, (4, 6)).t()
    wanted = combined([given(rank, torch.float32, (4, 6)) for rank in range(group.size)], ReduceOp.AVG).t()
    mpisgd.all_reduce(mine, ReduceOp.AVG, group)
    assert_near(mine, wanted)
    conjugated = torch.complex(mine, mine).conj()
    mpisgd.broadcast(conjugated, group.ranks[0], group)
    assert_near(conjugated.resolve_conj(), torch.complex(wanted, -wanted))
    part = torch.zeros(8)[::2]
    mpisgd.reduce_scatter_tensor(part, torch.ones(group.size, 4), group=group)
    assert part.tolist() == [group.size] * 4


def test_asynchronous_operations_end_with_their_results(group):
    mine = [given(group.rank + i, torch.float32, (50,)) for i in range(3)]
    strided = given(group.rank + 3, torch.float32, (50, 2))[:, 0]
    works = [mpisgd.all_reduce(tensor, group=group, async_op=True) for tensor in [*mine, strided]]
    future = works[1].get_future()
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.error is None
    assert future.wait()[0] is mine[1]
    for i, tensor in enumerate(mine):
        wanted = [given(rank + i, torch.float32, (50,)) for rank in range(group.size)]
        assert_near(tensor, combined(wanted, ReduceOp.SUM))
    wanted = [given(rank + 3, torch.float32, (50, 2))[:, 0] for rank in range(group.size)]
    assert_near(strided.contiguous(), combined([tensor.contiguous() for tensor in wanted], ReduceOp.SUM))


def test_a_result_that_is_waited_for_by_its_future_alone_is_complete(group):
    strided = given(group.rank, torch.float32, (50, 2))[:, 1]
    mpisgd.all_reduce(strided, group=group, async_op=True).get_future().wait()
    wanted = [given(rank, torch.float32, (50, 2))[:, 1].contiguous() for rank in range(group.size)]
    assert_near(strided.contiguous(), combined(wanted, ReduceOp.SUM))


def test_long_tensors_go_in_chunks(group, monkeypatch):
    from mpisgd.transport.device import chunked_pipeline

    monkeypatch.setattr(chunked_pipeline, "CHUNK_BYTES", 64)
    for numel in (32, 33, 161):
        mine = given(group.rank, torch.float32, (numel, 2))[:, 0]
        wanted = [given(rank, torch.float32, (numel, 2))[:, 0].contiguous() for rank in range(group.size)]
        mpisgd.all_reduce(mine, ReduceOp.MAX, group)
        assert_near(mine.contiguous(), combined(wanted, ReduceOp.MAX))


@pytest.mark.mpi(min_size=2)
def test_messages_keep_their_tags(group):
    """Both send before they receive, and take the second message first: NCCL would wait for ever."""
    peer = mpisgd.rank() ^ 1
    if peer < mpisgd.size():
        works = [
            mpisgd.isend(torch.full((4,), 10.0 * mpisgd.rank() + tag), peer, group, tag) for tag in (1, 2)
        ]
        got = {tag: torch.zeros(8)[::2] for tag in (2, 1)}
        for tag, tensor in got.items():
            assert mpisgd.recv(tensor, peer, group, tag) == peer
            assert tensor.tolist() == [10.0 * peer + tag] * 4
        for work in works:
            work.wait()


def test_every_transport_takes_what_it_should(transport, group):
    """By the calls that reach gloo, and by the copies: a test that all transports pass shows nothing."""
    stand_in, _ = transport
    copies, calls = stand_in.num_copies, [len(inner.calls) for inner in stand_in.opened]
    mpisgd.all_reduce(torch.ones(5), group=group)
    mpisgd.all_gather_into_tensor(
        torch.zeros(group.size * 5, dtype=torch.int16), torch.ones(5).short(), group
    )
    new_copies = stand_in.num_copies - copies
    new_calls = [inner.calls[known:] for inner, known in zip(stand_in.opened, calls, strict=True)]
    if group.device.selection.name == "nccl":
        everyone((new_copies, new_calls) == (0, [["allreduce", "all_gather"]]), f"{new_copies} {new_calls}")
    elif group.device.selection.name == "cuda-aware mpi":
        everyone(new_copies == 0, f"{new_copies}")
    else:
        everyone(new_copies == 4, f"{new_copies}")
    mpisgd.all_reduce(torch.ones(5, dtype=torch.int16), ReduceOp.BXOR, group)  # nobody but us has that
    everyone(stand_in.num_copies == copies + new_copies + 2)


def test_objects_and_barriers_know_nothing_of_devices(group):
    everyone(mpisgd.broadcast_object({"rank": mpisgd.rank()}, 0, group) == {"rank": 0})
    mpisgd.barrier(group)


# -- how it is chosen -----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", [{"nccl": True, "shared": True}], indirect=True)
def test_ranks_that_share_a_gpu_are_staged_with_one_warning(device, monkeypatch):
    monkeypatch.setattr(device_transport, "_warned", False)
    group = mpisgd.new_group()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mpisgd.all_reduce(torch.zeros(3), group=group)
        mpisgd.all_reduce(torch.zeros(4), group=group)
    everyone(group.device.selection.name == "pinned host memory")
    everyone(len(seen) == (group.rank == 0), f"{[str(one.message) for one in seen]}")
    if group.rank == 0:
        assert "share one GPU of host" in str(seen[0].message)
        assert "ranks 0, 1" in str(seen[0].message)
    close_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", [{"nccl": True, "shared": True}, {}], indirect=True, ids=str)
def test_nccl_that_cannot_be_is_an_error_on_every_rank_and_the_group_lives(device, monkeypatch):
    group = mpisgd.new_group()
    monkeypatch.setattr(current_job(), "gpu", "nccl")
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.all_reduce(torch.zeros(3), group=group)
    same_on_all_ranks(caught.text)
    assert "share one GPU" in caught.text or "has no NCCL" in caught.text
    monkeypatch.setattr(current_job(), "gpu", "mpi")
    mine = torch.ones(3)
    mpisgd.all_reduce(mine, group=group)
    everyone(mine.tolist() == [group.size] * 3)
    close_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", [{"nccl": True}], indirect=True)
def test_ranks_that_took_different_transports_are_told_at_the_next_check(device):
    """NCCL meets nobody: what the ranks did is compared when they next meet, and then they begin anew."""
    group = opened("auto")
    first = device.opened[-1]
    if group.rank == 0:
        group.device.backend._inner.allreduce = lambda tensors, op: None  # it would wait for the others
    mine = torch.ones(3 if group.rank == 0 else 4)
    if group.rank == 0:
        mpisgd.all_reduce(mine, group=group)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.barrier(group)
    everyone("operation" in caught.text)
    everyone(first.ended == "abort")
    mine = torch.ones(3)
    mpisgd.all_reduce(mine, group=group)
    everyone(mine.tolist() == [group.size] * 3)
    everyone(device.opened[-1] is not first)
    close_group(group)
    everyone(device.opened[-1].ended == "shutdown")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", [{"nccl": True}], indirect=True)
def test_nccl_keeps_its_place_between_asynchronous_operations(device):
    """The queue's thread is at work on others when NCCL's are called: the history must not depend on that."""
    group = opened("auto")
    for i in range(20):
        works = [
            mpisgd.all_reduce(torch.full((1000,), 1, dtype=torch.int16), ReduceOp.BXOR, group, async_op=True)
            for _ in range(i % 3)
        ]
        mine = torch.ones(5)
        mpisgd.all_reduce(mine, group=group)
        everyone(mine.tolist() == [group.size] * 5)
        for work in works:
            work.wait()
    mpisgd.barrier(group)
    close_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_tensor_on_the_cpu_here_and_on_a_gpu_there_is_a_mismatch(job):
    group = mpisgd.new_group()
    set_runtime(EagerDevice() if mpisgd.rank() == 0 else None)
    try:
        with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
            mpisgd.all_reduce(torch.ones(3), group=group)
    finally:
        set_runtime(None)
    everyone("first on cpu" in caught.text and "rank 0: operation" in caught.text, caught.text)
    close_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", [{"nccl": True}], indirect=True)
def test_sizes_of_an_exchange_are_compared_before_anything_is_sent(device):
    group = opened("auto")
    pieces = [torch.ones(2) for _ in group.ranks]
    expected = [torch.zeros(3 if group.rank == 0 else 2) for _ in group.ranks]
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.all_to_all(expected, pieces, group)
    everyone("sends 2 elements to rank 0, which expects 3" in caught.text, caught.text)
    close_group(group)


def test_tensors_made_in_inference_mode(group):
    with torch.inference_mode():
        mine = [torch.full((4,), 1.0), torch.ones(4, 2)[:, 0]]
    for tensor in mine:
        mpisgd.all_reduce(tensor, group=group)
        assert tensor.tolist() == [group.size] * 4
