"""NCCL between hosts that have addresses of their own, on simulated GPUs, connected by mpisgd's own store."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from clusters import ROOT, run_code, run_on
from launcher import python

sys.path.insert(0, str(ROOT / "tests"))
from simulated_gpu.guard import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler to simulate GPUs")

LOST = ROOT / "tests" / "launch" / "programs" / "lost_gpu_rank.py"

PROGRAM = f"""
    import sys
    sys.path[:0] = {[str(ROOT / "tests"), str(ROOT / "scripts")]!r}
    import copy, torch
    from gpu_checks.gpu import end_simulation
    from simulated_gpu.runtime import SimulatedGpu
    import mpisgd
    from mpisgd.accelerator.runtime import set_runtime
    from mpisgd.job.lifecycle import world
    from mpisgd.transport.tcp_store.network_store import NetworkStore
    set_runtime(SimulatedGpu())
    mpisgd.init(gpu="nccl", timeout_s=60)
    rank, size = mpisgd.rank(), mpisgd.size()
    place = f"simgpu:{{mpisgd.local_rank()}}"
    assert (size, [mpisgd.node_rank(), mpisgd.num_nodes()]) == (3, [0 if rank < 2 else 1, 2])

    # Collectives and messages, of the world and of a group whose ranks are on two hosts.
    group = mpisgd.new_group([0, 2])
    for ranks, members in ((range(3), None), ([0, 2], group)):
        if rank not in ranks:
            continue
        tensor = torch.full((1000,), rank + 1.0, device=place)
        mpisgd.all_reduce(tensor, group=members)
        assert tensor.tolist() == [sum(r + 1.0 for r in ranks)] * 1000
        mine = torch.full((5,), float(rank), device=place)
        everyones = torch.zeros(len(ranks), 5, device=place)
        mpisgd.all_gather_into_tensor(everyones, mine, members)
        assert everyones[:, 0].tolist() == list(ranks)
        mpisgd.broadcast(mine, 2, members)
        assert mine.tolist() == [2.0] * 5
    sent, taken = torch.full((50,), rank + 1.0, device=place), torch.zeros(50, device=place)
    work = mpisgd.isend(sent, (rank + 1) % size)
    mpisgd.recv(taken, (rank - 1) % size)
    work.wait()
    assert taken.tolist() == [(rank - 1) % size + 1.0] * 50

    transport = world().device
    assert transport.selection.name == "nccl"
    assert {{"allreduce", "all_gather", "broadcast"}} <= set(transport.backend.inner.calls)
    stores = [transport.backend.store]
    while hasattr(stores[-1], "underlying_store"):
        stores.append(stores[-1].underlying_store)
    assert isinstance(stores[-1], NetworkStore), stores

    # Training.
    def trained(strategy):
        torch.manual_seed(3)
        layers = torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2)
        alone = torch.nn.Sequential(*layers).double().to(place)
        ours = copy.deepcopy(alone)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        optimizer = mpisgd.DistributedOptimizer(optimizer, strategy=strategy, bucket_cap_bytes=256)
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            inputs = torch.randn(12, 4, generator=draw, dtype=torch.float64).to(place)
            for model, opt, rows in ((alone, plain, inputs), (ours, optimizer, inputs.chunk(size)[rank])):
                opt.zero_grad()
                model(rows).square().mean().backward()
                opt.step()
        pairs = zip(alone.parameters(), ours.parameters())
        return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)

    for strategy in (mpisgd.Synchronous(), mpisgd.Sharded(2)):
        off = trained(strategy)
        assert off < 1e-12, (strategy, off)
    print("right", flush=True)
    mpisgd.shutdown()
    end_simulation(0)
"""


def test_collectives_messages_and_training_by_nccl_equal_one_process():
    done = run_code("2,1", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right"] * 3


@pytest.mark.long  # tests/launch/test_lost_gpu_rank.py has it on one host, and NCCL between hosts is above
def test_the_survivors_of_a_killed_rank_are_woken_and_go_on_between_hosts(tmp_path: Path):
    path = tmp_path / "lines"
    done = run_on("2,1", python(), str(LOST), str(path), options="--with-ft ulfm", logs=[path])
    assert path.exists(), done.stderr
    first, last = path.read_text().splitlines()
    found = re.fullmatch(r"3 ranks, sum 12; woken after ([\d.]+) s: PeerLost: .*lost.*", first)
    assert found, first
    assert float(found[1]) < 5.0
    assert last == "2 ranks, sum 8"
    assert done.returncode == 0, done.stderr
