"""A transport is a class and a line in the table; it needs neither shared memory nor all operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given
from torch import Tensor
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.collectives import all_reduce
from mpisgd.collectives.all_reduce import choose_algorithm
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.groups import close_group
from mpisgd.transport import transports
from mpisgd.transport.members import Members
from mpisgd.transport.torch_reduction import combine_in_rank_order
from mpisgd.tuning import CostModel

pytestmark = pytest.mark.mpi(min_size=2)
MOST_BYTES = 1000


class PickledTransport(HostTransport):
    """Small reductions of float32, as objects that MPI sends."""

    name = "pickled"
    spans_hosts = True

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.reduced: list[int] = []

    @classmethod
    def open(cls, members: Members, opened: Sequence[HostTransport]) -> PickledTransport:
        return cls(members.communicator)

    @property
    def memory(self) -> None:
        return None

    @property
    def digest_exchange(self) -> None:
        return None

    def takes(self, collective: str, dtype: torch.dtype | None, nbytes: int) -> bool:
        return collective in ("all_reduce", "reduce") and dtype is torch.float32 and nbytes <= MOST_BYTES

    def run_steps(self, steps: Steps) -> None:
        for _ in steps:
            self._communicator.barrier()

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Steps:
        yield
        self.all_reduce_now(flat, op)

    def all_reduce_now(self, flat: Tensor, op: ReduceOp, region: object = None) -> None:
        self.reduced.append(flat.numel())
        combine_in_rank_order(self._communicator.all_gather_object(flat.clone()), op, out=flat)

    def reduce(self, flat: Tensor, op: ReduceOp, root: int) -> Steps:
        yield
        mine = flat if self._communicator.rank == root else flat.clone()
        self.all_reduce_now(mine, op)


@pytest.fixture
def group(job, monkeypatch):
    """A group with this transport alone."""
    monkeypatch.setattr(transports, "TRANSPORTS", (PickledTransport,))
    monkeypatch.setenv("MPISGD_CHECK_STAGING", "1")
    made = mpisgd.new_group()
    if not made.transports:
        pytest.skip("MPISGD_SHARED_MEMORY=0")
    made.costs = CostModel("none", ())  # nobody has measured it
    yield made
    close_group(made)


def test_what_it_does_not_take_by_name_is_said(group, monkeypatch):
    monkeypatch.setitem(all_reduce.SPANS_HOSTS, "pickled", True)
    monkeypatch.setattr(all_reduce, "CHOICES", (*all_reduce.CHOICES, "pickled"))
    everyone(choose_algorithm(group, "pickled", torch.ones(2)) == "pickled")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = choose_algorithm(group, "pickled", torch.ones(1000))
    told = [str(each.message).partition(": ")[2] for each in caught]
    expected = ["algorithm='pickled' takes no 4000 bytes of float32; it is 'auto'"] * (group.rank == 0)
    everyone((chosen, told) == ("mpi", expected), (chosen, told))


@pytest.mark.parametrize(("numel", "dtype"), [(7, torch.float32), (1000, torch.float32), (7, torch.float64)])
def test_it_gets_what_it_takes_and_mpi_the_rest(group, numel, dtype):
    (transport,), takes = group.transports, dtype is torch.float32 and numel * 4 <= MOST_BYTES
    inputs = [given(rank, dtype, (numel,)) for rank in range(group.size)]
    mine = inputs[group.rank].clone()
    mpisgd.reduce(mine, 0, group=group)
    assert_near(mine, combined(inputs, ReduceOp.SUM) if group.rank == 0 else inputs[group.rank])
    assert transport.reduced == [numel] * takes
    out = torch.zeros(group.size, numel, dtype=dtype)
    mpisgd.all_gather_into_tensor(out, inputs[group.rank], group)
    assert_equal(out, torch.stack(inputs))
    chosen = choose_algorithm(group, "auto", inputs[0])
    everyone(chosen == ("pickled" if takes else "mpi"), chosen)
    everyone(not group.shares_memory and group.shared_memory is None)


def test_gradients_travel_through_it(group):
    model = torch.nn.Linear(3, 2)
    for param in model.parameters():
        torch.nn.init.ones_(param)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), group=group
    )
    model(torch.full((1, 3), float(group.rank))).sum().backward()
    optimizer.step()
    wanted = torch.full((2, 3), sum(range(group.size)) / group.size)
    assert_near(model.weight.grad, wanted)
    everyone(len(group.transports[0].reduced) > 0)
