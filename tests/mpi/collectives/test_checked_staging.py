"""Under MPISGD_CHECK_STAGING=1 all operations give what they give, and one that writes too early fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given
from torch import Tensor
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.core.consistency import Operation
from mpisgd.core.topology import arrange
from mpisgd.gradients.gradient_flags import FlagsExchange
from mpisgd.job.group_factory import make_group
from mpisgd.job.lifecycle import world

pytestmark = pytest.mark.mpi(min_size=2)
SIZES = (1, 1000, 2**18 + 3)


@pytest.fixture(params=["one host", "several hosts"])
def checked(request, job, monkeypatch):
    """A group that looks at what its operations write."""
    monkeypatch.setenv("MPISGD_CHECK_STAGING", "1")
    hosts = [0] * mpisgd.size() if request.param == "one host" else [0, *[1] * (mpisgd.size() - 1)]
    group = make_group(
        request.param,
        range(mpisgd.size()),
        world().queue.communicator.duplicate(),
        timeout_s=30,
        threads_allowed=True,
        topology=arrange(mpisgd.rank(), hosts, [f"host{host}" for host in hosts]),
    )
    if not group.transports:
        pytest.skip("MPISGD_SHARED_MEMORY=0")
    yield group
    group.queue.drain()
    if group.queue.broken is None:
        group.free()
    else:
        group.leave()


@pytest.mark.parametrize("algorithm", ["auto", "node", "direct", "hierarchical"])
@pytest.mark.parametrize("numel", SIZES)
def test_an_all_reduce_writes_nothing_too_early(checked, numel, algorithm):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [given(rank, dtype, (numel,)) for rank in range(checked.size)]
        mine = inputs[checked.rank].clone()
        mpisgd.all_reduce(mine, group=checked, algorithm=algorithm)
        assert_near(mine, combined(inputs, ReduceOp.SUM))


@pytest.mark.parametrize("numel", SIZES)
def test_nor_do_the_other_collectives(checked, numel):
    rank, size = checked.rank, checked.size
    inputs = [given(other, torch.float32, (numel,)) for other in range(size)]
    mine = inputs[rank].clone()
    mpisgd.reduce(mine, 0, group=checked)
    assert_near(mine, combined(inputs, ReduceOp.SUM) if rank == 0 else inputs[rank])
    mine = inputs[rank].clone()
    mpisgd.broadcast_coalesced([mine], size - 1, checked)
    assert_equal(mine, inputs[-1])
    outputs = [torch.zeros(numel) for _ in inputs]
    mpisgd.all_gather(outputs, inputs[rank], checked)
    assert_equal(torch.stack(outputs), torch.stack(inputs))
    part = torch.zeros(numel)
    mpisgd.reduce_scatter(part, inputs, group=checked)
    assert_near(part, inputs[rank] * size)
    mpisgd.all_to_all(outputs, [inputs[rank]] * size, checked)
    assert_equal(torch.stack(outputs), torch.stack(inputs))
    mpisgd.gather(inputs[rank], outputs if rank == 0 else None, 0, checked)
    mpisgd.scatter(part, inputs if rank == 0 else None, 0, checked)
    assert_equal(part, inputs[rank])


def test_nor_does_the_exchange_of_kinds(checked):
    """It has no call of its own and goes by the same door."""
    flags = FlagsExchange(bytes([1 << (checked.rank % 2), 0]), checked)
    checked.queue.run(Operation("test"), flags.finish, before=flags.before)
    everyone(flags.joined == bytes([3, 0]), str(flags.joined))


class AtOnce:
    """A reduction at once whose first part is given."""

    def __init__(self, begin: Callable[[Tensor], object]) -> None:
        self.begin = begin

    def finish(self, tensor: Tensor) -> None:
        raise AssertionError("the ranks have not agreed")


@pytest.fixture(params=["in steps", "at once"])
def begins_with(request, checked, monkeypatch):
    """Lets the all-reduce of the group's transport begin with something else."""

    def change(first: Callable[[Tensor], object]) -> None:
        def all_reduce(flat, op):
            first(flat)
            yield

        at_once = AtOnce(first) if request.param == "at once" else None
        monkeypatch.setattr(checked.transports[0], "all_reduce", all_reduce)
        monkeypatch.setattr(checked.transports[0], "all_reduce_at_once", lambda *form: at_once)

    return change


def test_a_transport_that_writes_too_early_fails_on_every_rank(checked, begins_with):
    begins_with(Tensor.zero_)
    with pytest.raises(AssertionError, match="has written into a tensor of the call"):
        mpisgd.all_reduce(torch.ones(3), group=checked, algorithm=checked.transports[0].name)
    everyone(checked.queue.broken is not None)


def test_a_transport_that_takes_the_half_in_use_fails_on_every_rank(checked, begins_with):
    transport = checked.transports[0]
    if checked.spans_hosts:
        pytest.skip("a rank that is alone on its host has no staging memory")
    begins_with(lambda _: [buffer[:1].add_(1) for buffer in transport.guarded()])
    with pytest.raises(AssertionError, match="has written into staging buffer 0 of those"):
        mpisgd.all_reduce(torch.ones(3), group=checked, algorithm=transport.name)
