"""A timeline of all ranks, started and ended within a job."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
import mpisgd.horovod as hvd
from mpisgd import tracing
from mpisgd.job.lifecycle import world
from mpisgd.timeline.clock import offset_by_messages


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(mpisgd.broadcast_object(tmp_path / "run.json"))


def recorded(path: str) -> list[dict]:
    """What is in the file of all ranks; the tests run on one host."""
    mpisgd.barrier()
    return json.loads(Path(path).read_text())


def spans_of(found: list[dict], rank: int, name: str) -> list[dict]:
    return [event for event in found if event["ph"] == "X" and (event["pid"], event["name"]) == (rank, name)]


def test_every_operation_of_every_rank_is_in_one_file(path):
    rank, size = mpisgd.rank(), mpisgd.size()
    mpisgd.start_timeline(path)
    mpisgd.all_reduce(torch.full((100,), float(rank)))
    mpisgd.broadcast(torch.ones(7, dtype=torch.float64), 0)
    work = mpisgd.all_reduce(torch.ones(1000), async_op=True, algorithm="ring")
    work.wait()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = mpisgd.isend(torch.ones(5), after)
    mpisgd.irecv(torch.ones(5), before).wait()
    sent.wait()
    mpisgd.stop_timeline()
    mpisgd.all_reduce(torch.ones(3))
    found = recorded(path)
    everyone(tracing.sink is None)
    numbers = []
    for r in range(size):
        first, second = spans_of(found, r, "all_reduce")
        assert (first["args"]["bytes"], second["args"]["bytes"]) == (400, 4000)
        assert (first["args"]["async"], second["args"]["async"]) == (False, True)
        assert first["args"]["transport"] == ("mpi" if size == 1 else "node")
        assert second["args"]["transport"] == "ring"
        assert second["args"]["queue_us"] > 0
        assert spans_of(found, r, "broadcast")[0]["args"]["bytes"] == 56
        sending = f"send to rank {(r + 1) % size}"
        assert any(
            e["name"] == sending and e["args"] == {"bytes": 20}
            for e in found
            if e["ph"] == "b" and e["pid"] == r
        )
        numbers.append((first["args"]["number"], second["args"]["number"]))
    assert numbers == numbers[:1] * size
    assert not list(Path(path).parent.glob("*rank*"))


@pytest.mark.mpi(min_size=2)
def test_who_came_late_is_seen_by_the_others_waiting(path):
    rank, size = mpisgd.rank(), mpisgd.size()
    mpisgd.start_timeline(path)
    mpisgd.barrier()
    if rank == size - 1:
        time.sleep(0.2)
    mpisgd.all_reduce(torch.ones(10))
    mpisgd.stop_timeline()
    found = recorded(path)
    spans = [spans_of(found, r, "all_reduce")[0] for r in range(size)]
    assert all(span["args"]["wait_us"] > 100_000 for span in spans[:-1])
    assert spans[-1]["args"]["wait_us"] < 100_000
    arrivals = [span["ts"] + span["args"]["arrived_us"] for span in spans]
    assert arrivals[-1] - max(arrivals[:-1]) > 100_000
    mets = [a + span["args"]["wait_us"] for a, span in zip(arrivals, spans, strict=True)]
    assert max(arrivals) <= min(mets) + 1  # one clock: nobody has met before the last one came


@pytest.mark.mpi(min_size=2)
def test_clocks_are_compared_by_messages():
    """Other ranks' clocks go wrong on purpose."""
    communicator = world().queue.communicator.duplicate()
    wrong_ns = 3_000_000_000 * communicator.rank
    mpisgd.barrier()
    results = [
        offset_by_messages(communicator, other, lambda: time.monotonic_ns() + wrong_ns)
        for other in range(1, communicator.size)
        if communicator.rank in (0, other)
    ]
    offset_ns, error_ns = results[0]
    everyone(abs(offset_ns + wrong_ns) <= error_ns, f"{offset_ns} +- {error_ns} for {-wrong_ns}")
    everyone(error_ns < 500_000_000)
    communicator.free()


def test_a_rank_that_cannot_write_is_named_by_all(tmp_path):
    (tmp_path / "file").write_text("")
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.start_timeline(mpisgd.broadcast_object(str(tmp_path / "file" / "run.json")))
    everyone("rank 0 cannot write" in caught.text, caught.text)
    everyone(tracing.sink is None)


@pytest.mark.parametrize("asking", [0, -1])
def test_negotiated_operations_show_what_they_wait_for(path, asking):
    """One rank asks for the timeline; all record."""
    rank, size = mpisgd.rank(), mpisgd.size()
    hvd.init()
    if rank == asking % size:
        hvd.start_timeline(path, mark_cycles=True)
    hvd.barrier()
    if rank == size - 1:
        time.sleep(0.1)
    handles = [
        hvd.allreduce_async(torch.full((3 + i,), float(rank)), name=f"g{i}", op=hvd.Sum) for i in range(2)
    ]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.allgather(torch.ones(rank + 1, 2), name="rows")
    if rank == asking % size:
        hvd.stop_timeline()
    hvd.barrier()
    everyone(tracing.sink is None)
    found = recorded(path)
    mpisgd.barrier()
    hvd.shutdown()
    sums = {}
    for r in range(size):
        phases = [
            e
            for e in found
            if e["pid"] == r and e.get("id2") == {"local": "0 allreduce.g1"} and e["ph"] == "b"
        ]
        names = [e["name"] for e in phases]
        assert names[:4] == ["g1", "NEGOTIATE_ALLREDUCE", "QUEUE", "ALLREDUCE"]
        assert "MPI_ALLREDUCE" in names
        args = phases[0]["args"]
        assert (args["bytes"], args["ranks"]) == (16, size)
        sums[r] = (args["number"], args["together"])
        rows = next(e["args"] for e in found if e["pid"] == r and e["name"] == "rows" and e["ph"] == "b")
        assert rows["bytes"] == 8 * (r + 1)
        assert spans_of(found, r, "negotiate")
        assert any(e["name"] == "CYCLE_START" and e["pid"] == r for e in found)
        if r < size - 1:
            assert args["negotiate_us"] > 50_000
    assert len(set(sums.values())) == 1


def seven_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(7)))


def train_a_step(opt: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    model(torch.full((2, 4), float(mpisgd.rank()))).sum().backward()
    opt.step()


def groups_of_gradients(found: list[dict], rank: int) -> list[dict]:
    """The arguments of one rank's reductions of gradients."""
    mine = [event for event in found if event["pid"] == rank and event["name"].startswith("gradients")]
    return [event["args"] for event in mine if "parameters" in event.get("args", ())]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("face", ["native", "horovod"])
def test_a_group_of_gradients_tells_whose_they_are(path, face):
    """The first few names with their bytes, and how many there are; with Horovod's API as with ours."""
    model, kind = seven_layers(), mpisgd if face == "native" else hvd
    options = {"bucket_cap_bytes": 200} if face == "native" else {"groups": 2}
    if face == "horovod":
        hvd.init()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = kind.DistributedOptimizer(sgd, model.named_parameters(), **options)
    mpisgd.start_timeline(path)
    train_a_step(opt, model)
    mpisgd.stop_timeline()
    found = recorded(path)
    if face == "horovod":
        hvd.shutdown()
    sizes = {name: param.nbytes for name, param in model.named_parameters()}
    for rank in range(mpisgd.size()):
        groups = groups_of_gradients(found, rank)
        assert sum(group["num_parameters"] for group in groups) == len(sizes)
        assert len(groups) > 1 if face == "native" else len(groups) == 1
        for group in groups:
            assert len(group["parameters"]) == min(5, group["num_parameters"])
            assert group["parameters"].items() <= sizes.items()
            assert group["bytes"] >= sum(group["parameters"].values())
    first = [groups_of_gradients(found, rank) for rank in range(mpisgd.size())]
    assert all([g["parameters"] for g in each] == [g["parameters"] for g in first[0]] for each in first)


def test_steps_memory_and_sent_bytes_are_recorded(path):
    rank, size = mpisgd.rank(), mpisgd.size()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    mpisgd.start_timeline(path)
    for _ in range(4):
        optimizer.step()
    received = mpisgd.irecv(torch.ones(25), (rank - 1) % size)
    mpisgd.isend(torch.ones(25), (rank + 1) % size).wait()
    received.wait()
    mpisgd.stop_timeline()
    found = recorded(path)
    for r in range(size):
        steps = [e for e in found if e["ph"] == "X" and e["pid"] == r and e["cat"] == "step"]
        assert len(steps) == 3  # from the end of the first one on
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in itertools.pairwise(steps))
        samples = {e["name"]: e["args"] for e in found if e["ph"] == "C" and e["pid"] == r}
        assert samples["memory"]["own"] > 0
        assert samples["bytes sent"][f"to rank {(r + 1) % size}"] >= 100
