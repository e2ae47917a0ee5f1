"""`Sharded` on several hosts: no byte crosses between them more often than an all-reduce would send it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from harness import (
    ADAM_DRIFT,
    FEATURES,
    Run,
    adam,
    check_equal_runs,
    digest,
    drift,
    let_some_travel_alone,
    pair,
    plain_step,
)
from pretended_hosts import EVEN, UNEVEN, group_of_hosts
from test_optimizers import Bag
from test_shared_parameters import Branches, branched
from torch import nn
from verdicts import everyone, referee, same_on_all_ranks

import mpisgd
from mpisgd import config
from mpisgd.core.group import Group

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(not config.shared_memory(), reason="several ranks of a host without shared memory"),
]

STAGES = (1, 2)


@pytest.fixture(autouse=True)
def way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some gradients travel alone, as those of a large model do."""
    let_some_travel_alone(monkeypatch)


@pytest.fixture(params=["even", "uneven"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Group]:
    leaders = {"even": EVEN, "uneven": UNEVEN}[request.param][mpisgd.size()]
    if request.param == "uneven" and leaders == EVEN[mpisgd.size()]:
        pytest.skip("the same as even")
    with group_of_hosts(leaders) as made:
        yield made


def clipped_step(run: Run, step: int) -> None:
    run.opt.zero_grad()
    with run.no_sync():
        run.backward(step, 0)
    run.backward(step, 1)
    run.clip(0.1)
    run.opt.step()


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_equals_one_process(hosts, stage, shares):
    how = {"group": hosts, "strategy": mpisgd.Sharded(stage), "share_parameters": shares}
    plain, ours = check_equal_runs(clipped_step, optimizer=adam, tol=ADAM_DRIFT, **how)
    wanted, got = plain.opt.state_dict()["state"], ours.opt.state_dict()["state"]
    everyone(list(wanted) == list(got), f"{list(got)}")
    same_on_all_ranks(digest(value for entries in got.values() for value in entries.values()))
    ours.opt.load_state_dict(copy.deepcopy(plain.opt.state_dict()))
    plain_step(plain, 30)
    plain_step(ours, 30)
    off = max(map(drift, plain.model.parameters(), ours.model.parameters()))
    everyone(off < ADAM_DRIFT, f"{off}")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_of_synchronous(hosts, stage, overlap):
    strategies = (mpisgd.Synchronous(), mpisgd.Sharded(stage))
    runs = [pair(group=hosts, strategy=s, overlap=overlap, bucket_cap_bytes=100)[1] for s in strategies]
    for step in range(20):
        for run in runs:
            plain_step(run, step)
        off = max(map(drift, runs[0].model.parameters(), runs[1].model.parameters()))
        everyone(off <= 1e-12, f"step {step}: {off}")
        same_on_all_ranks(digest(runs[1].model.parameters()))


@pytest.mark.parametrize("stage", STAGES)
def test_casts_are_those_of_synchronous(hosts, stage):
    how = {"group": hosts, "compression": mpisgd.Compression.bf16, "bucket_cap_bytes": 100}
    runs = [pair(strategy=s, **how)[1] for s in (mpisgd.Synchronous(), mpisgd.Sharded(stage))]
    for step in range(5):
        for run in runs:
            plain_step(run, step)
        off = max(map(drift, runs[0].model.parameters(), runs[1].model.parameters()))
        everyone(off <= 1e-12, f"step {step}: {off}")


@pytest.mark.parametrize("stage", STAGES)
def test_unused_and_frozen_parameters(hosts, stage):
    strategy = mpisgd.Sharded(stage)
    check_equal_runs(model=Branches, loss=branched, by_rank=True, strategy=strategy, group=hosts)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(hosts, stage):
    def optimizer(model):
        return torch.optim.SparseAdam(model.parameters(), lr=0.02)

    def body(run: Run, step: int) -> None:
        run.model.zero_grad()
        run.backward(step)
        run.opt.step()

    how = {"tol": ADAM_DRIFT, "strategy": mpisgd.Sharded(stage), "group": hosts}
    check_equal_runs(body, model=Bag, optimizer=optimizer, **how)


def sent_in_a_step(group: Group, **how) -> tuple[int, int]:
    """The bytes that all ranks send in one step, and those of the parameters."""

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))

    _, ours = pair(group=group, model=large, optimizer=adam, **how)
    communicator = group.queue.communicator
    for step in range(2):
        before = communicator.sent_bytes
        plain_step(ours, step)
    sent = sum(referee().allgather(communicator.sent_bytes - before))
    return sent, sum(param.nbytes for param in ours.model.parameters())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shares", [False, True])
def test_as_many_bytes_travel_as_in_an_all_reduce(hosts, stage, shares):
    """2 (h - 1) P between h hosts: half of it gradients, half of it parameters."""
    num_hosts = hosts.topology.num_nodes
    sent, size = sent_in_a_step(hosts, strategy=mpisgd.Sharded(stage), share_parameters=shares)
    formula = 2 * (num_hosts - 1) * size
    everyone(formula <= sent < 1.02 * formula, f"{sent} bytes, {formula} by the formula")
    synchronous, _ = sent_in_a_step(hosts, strategy=mpisgd.Synchronous())
    everyone(sent < 1.02 * synchronous, f"{sent} bytes, Synchronous sends {synchronous}")
