"""Training on several hosts, some of them with a single rank, pretended on one machine."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator

import pytest
import torch
from harness import ADAM_DRIFT, Run, check_equal_runs, digest, drift, pair, plain_step
from pretended_hosts import UNEVEN, group_of_hosts
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import checkpoint, config
from mpisgd.compress import QSGD, OneBit, PerHost, PowerSGD, Threshold, TopK
from mpisgd.compress.compressor import BucketLayout
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.owner import Owner, owned_by
from mpisgd.job.lifecycle import world
from mpisgd.methods.per_host import paper
from mpisgd.methods.top_k.paper import TopK as PaperOfTopK
from mpisgd.tools.verification.paper_run import Definition, PaperRun
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
        run.clip(0.1)
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


SHAPE = (12, 5)


def gradient(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SHAPE, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("op", [mpisgd.ReduceOp.AVG, mpisgd.ReduceOp.SUM], ids=str)
def test_a_host_compresses_the_mean_of_its_ranks(hosts, op, overlap):
    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    opt = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.1),
        compression=PerHost(TopK(0.2)),
        group=hosts,
        op=op,
        overlap=overlap,
    )
    factor = mpisgd.size() if op == mpisgd.ReduceOp.SUM else 1
    leaders = UNEVEN[mpisgd.size()]
    members = [[r for r, lead in enumerate(leaders) if lead == first] for first in sorted(set(leaders))]
    alone = {rank: {"x": torch.zeros(SHAPE, dtype=torch.float64)} for rank in range(mpisgd.size())}
    still = {rank: torch.optim.SGD(mine.values(), lr=0.0) for rank, mine in alone.items()}
    run = PaperRun(Definition(paper.PerHost(PaperOfTopK(ratio=0.2))), alone, still, hosts=members)
    for step in range(20):
        expected = run.step({rank: {"x": gradient(rank, step)} for rank in run.ranks})[0]["x"]
        opt.zero_grad()
        (param * gradient(mpisgd.rank(), step)).sum().backward()
        off = float((param.grad - factor * expected).abs().max())
        everyone(off < 1e-12, f"step {step}: {off}")
        same_on_all_ranks(digest([param.grad]))
        opt.step()


def test_on_one_host_nothing_is_compressed():
    plain, ours = pair(compression=PerHost(TopK(0.01)))
    for step in range(3):
        for run in (plain, ours):
            plain_step(run, step)
    off = max(map(drift, plain.model.parameters(), ours.model.parameters()))
    everyone(off < 1e-12, f"{off}")


def test_hosts_agree_on_what_all_have_alike(hosts):
    """A rank that is the first of its host for the first time has factors of its own."""
    layout = BucketLayout((torch.Size(SHAPE),), torch.float64)
    results = []
    for alike in (True, False):
        reducer = PerHost(PowerSGD(1, error_feedback=False)).reducer(layout)
        scale = torch.arange(1.0, 6.0, dtype=torch.float64).view(5, 1)
        factor = scale if alike or mpisgd.rank() == 0 else scale.flip(0).pow(2)
        reducer.load_state_dict({**reducer.state_dict(), "factors": [factor]})
        bucket = gradient(mpisgd.rank(), 0).flatten()
        hosts.queue.run(
            Operation("a bucket"), lambda r=reducer, b=bucket: r.reduce(b, hosts, mpisgd.ReduceOp.AVG)
        )
        results.append(bucket)
    everyone(torch.equal(*results))
    inner = PowerSGD(1).reducer(layout).bytes_on_the_wire(hosts.topology.num_nodes)
    everyone(reducer.bytes_on_the_wire(hosts.size) == inner)


@pytest.mark.parametrize("how", ["own files", "a checkpoint"])
def test_what_the_first_of_each_host_keeps_is_saved(hosts, how, tmp_path):
    # A rank that is not the first of its host kept nothing, and so had no entry: after a load of own files it
    # compared nothing while the others did, and a checkpoint gave nobody a residual back.
    def made(seed):
        param = torch.nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))
        sgd = torch.optim.SGD([param], lr=0.1)
        return param, mpisgd.DistributedOptimizer(
            sgd, compression=PerHost(OneBit(two_step=True)), group=hosts
        )

    def train(param, optimizer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            (param * gradient(mpisgd.rank(), step).float()).sum().backward()
            optimizer.step()

    (param, optimizer), (again, resumed) = made(0), made(1)
    train(param, optimizer, 0, 3)
    if how == "own files":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        folder = mpisgd.broadcast_object(str(tmp_path))
        checkpoint.load(checkpoint.save(folder, 3, optimizer=optimizer), optimizer=resumed)
    again.data.copy_(param.data)
    train(param, optimizer, 3, 6)
    train(again, resumed, 3, 6)
    everyone(torch.equal(again, param), f"{(again - param).abs().max()}")


def test_what_is_done_inside_an_operation_has_its_owner_in_any_thread(hosts):
    # Where one rank waited in its own thread, and another one's queue went on without it, PerHost's
    # reductions on a host had the optimizer as their owner on one rank alone: CollectiveMismatch, at random.
    with owned_by(Owner("optimizer", 1, "SGD", "")):
        if mpisgd.rank() == 0:
            time.sleep(0.1)
        work = hosts.queue.run(
            Operation("outer"),
            lambda: world().queue.run(Operation("inner"), lambda: None),
            async_op=mpisgd.rank() > 0,
        )
    if work is not None:
        work.wait()
    everyone(True)
