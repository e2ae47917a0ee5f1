"""Training on several hosts, some of them with a single rank, pretended on one machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from harness import ADAM_DRIFT, Run, check_equal_runs, digest, drift, pair, plain_step
from pretended_hosts import UNEVEN, group_of_hosts
from torch import nn
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import config
from mpisgd.compress import QSGD, PowerSGD, Threshold, TopK
from mpisgd.core.group import Group
from mpisgd.job.lifecycle import world
from mpisgd.tuning import CostModel, Curve, LineSegment, MeasuredCurves

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(not config.shared_memory(), reason="several ranks of a host without shared memory"),
]


def mpi_is_fastest() -> CostModel:
    """What `auto` would take then must not matter to ranks that reduce in shared memory."""
    curves = (Curve("mpi", False, (LineSegment(math.inf, 0.0, 0.0),)),)
    return CostModel("test", tuple(MeasuredCurves(ranks, curves) for ranks in ((1, 1), (2, 2))))


@pytest.fixture
def hosts() -> Iterator[Group]:
    with group_of_hosts(UNEVEN[mpisgd.size()], mpi_is_fastest()) as made:
        yield made


@pytest.mark.parametrize("bucket_cap_bytes", [1, 2**20])
def test_a_rank_that_is_alone_on_its_host_goes_along(hosts, bucket_cap_bytes):
    """It has no shared memory, and must not choose another transport than those that have."""
    check_equal_runs(group=hosts, bucket_cap_bytes=bucket_cap_bytes)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_host_has_its_copy_of_shared_parameters(hosts, overlap):
    """The ranks of a host divide its copy among them; where one is alone it has all the work."""

    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        if run.distributed:
            run.opt.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.opt.step()

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    how = {"group": hosts, "share_parameters": True, "overlap": overlap}
    plain, ours = check_equal_runs(body, optimizer=adam, tol=ADAM_DRIFT, **how)
    wanted, got = plain.opt.state_dict()["state"], ours.opt.state_dict()["state"]
    everyone(list(wanted) == list(got), f"{list(got)}")
    same_on_all_ranks(digest(value for entries in got.values() for value in entries.values()))


def test_halves_on_the_wire(hosts):
    check_equal_runs(group=hosts, compression=mpisgd.Compression.bf16, tol=0.05)


@pytest.mark.parametrize(
    "compression", [TopK(0.3), TopK(0.9), Threshold(0.1), PowerSGD(1), QSGD(4)], ids=repr
)
def test_compressed_gradients_are_those_of_ranks_of_one_host(hosts, compression):
    runs = [pair(group=group, compression=compression)[1] for group in (hosts, world())]
    for step in range(5):
        for run in runs:
            plain_step(run, step)
        off = max(map(drift, runs[0].model.parameters(), runs[1].model.parameters()))
        everyone(off < 1e-12, f"step {step}: {off}")
        same_on_all_ranks(digest(runs[0].model.parameters()))
