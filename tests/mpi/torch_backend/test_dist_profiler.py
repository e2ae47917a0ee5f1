"""What torch's profilers show of the backend's operations: names, shapes, and that they are asynchronous."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from verdicts import everyone

from mpisgd import UnsupportedOp
from mpisgd.torch_backend import profiling

N = 6
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`torch.distributed.\w+` (is|will be) deprecated:FutureWarning"
)


def autograd_profiler():
    return torch.autograd.profiler.profile(record_shapes=True)


def torch_profiler():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)


def events_of(prof) -> list[tuple[str, bool, list]]:
    """Name, whether it is asynchronous, and the shapes of each of our events."""
    seen = prof.events() if isinstance(prof, torch.profiler.profile) else prof.function_events
    return [(e.name, e.is_async, e.input_shapes) for e in seen if e.name.startswith("mpisgd:")]


def calls_of(pg: dist.ProcessGroup) -> dict[str, tuple[str, object, list]]:
    """By function: the event's name, the call, and the shapes of what this rank gives."""
    size, root = pg.size(), pg.rank() == 0
    x, whole = torch.ones(N), torch.ones(size * N)
    pieces = [torch.ones(N) for _ in range(size)]
    sparse = torch.eye(N).to_sparse()
    each = [[N]] * size
    return {
        "all_reduce": ("all_reduce", lambda **k: dist.all_reduce(x, **k), [[N]]),
        "sparse": ("sparse_all_reduce", lambda **k: dist.all_reduce(sparse, **k), [[N, N]]),
        "coalesced": (
            "all_reduce",
            lambda **k: dist.all_reduce_coalesced([x, whole], **k),
            [[N], [size * N]],
        ),
        "broadcast": ("broadcast", lambda **k: dist.broadcast(x, group_src=0, **k), [[N]]),
        "reduce": ("reduce", lambda **k: dist.reduce(x, group_dst=0, **k), [[N]]),
        "all_gather": ("all_gather", lambda **k: dist.all_gather(pieces, x, **k), [[N]]),
        "into_tensor": ("all_gather", lambda **k: dist.all_gather_into_tensor(whole, x, **k), [[N]]),
        "gather": ("gather", lambda **k: dist.gather(x, pieces if root else None, group_dst=0, **k), [[N]]),
        "scatter": (
            "scatter",
            lambda **k: dist.scatter(x, pieces if root else None, group_src=0, **k),
            each if root else [],
        ),
        "reduce_scatter": ("reduce_scatter", lambda **k: dist.reduce_scatter(x, pieces, **k), each),
        "tensor": ("reduce_scatter", lambda **k: dist.reduce_scatter_tensor(x, whole, **k), [[size * N]]),
        "all_to_all": ("all_to_all", lambda **k: dist.all_to_all(list(pieces), pieces, **k), each),
        "single": (
            "all_to_all",
            lambda **k: dist.all_to_all_single(torch.empty_like(whole), whole, **k),
            [[size * N]],
        ),
        "barrier": ("barrier", lambda **k: dist.barrier(**k), []),
    }


@pytest.mark.parametrize("profiler", [autograd_profiler, torch_profiler])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_collective_is_one_event(pg, profiler, async_op):
    for function, (name, call, shapes) in calls_of(pg).items():
        with profiler() as prof:
            work = call(group=pg, async_op=async_op)
            if async_op:
                work.wait()
        found = events_of(prof)
        everyone(found == [(f"mpisgd:{name}", True, shapes)], f"{function}: {found}")


def test_messages_are_events(pg):
    right, left = (pg.rank() + 1) % pg.size(), (pg.rank() - 1) % pg.size()
    with autograd_profiler() as prof:
        for src in (left, None):
            sent = dist.isend(torch.ones(N), group=pg, group_dst=right)
            dist.irecv(torch.empty(N), group=pg, group_src=src).wait()
            sent.wait()
    found = sorted(events_of(prof))
    wanted = [(f"mpisgd:{name}", True, [[N]]) for name in ("recv", "recvAnySource", "send", "send")]
    everyone(found == wanted, f"{found}")


def test_an_operation_that_is_refused_ends_its_event(pg):
    with autograd_profiler() as prof, pytest.raises(UnsupportedOp):
        pg.allreduce(torch.ones(N) > 0, dist.ReduceOp.AVG)
    everyone([name for name, _, _ in events_of(prof)] == ["mpisgd:all_reduce"])


def test_without_a_profiler_nothing_is_recorded(pg, monkeypatch):
    monkeypatch.setattr(profiling, "_begin", None)
    for _, call, _ in calls_of(pg).values():
        call(group=pg)


@pytest.mark.parametrize("profiler", [autograd_profiler, torch_profiler])
def test_ddp_shows_its_buckets(profiler):
    net = DistributedDataParallel(torch.nn.Linear(10, 10, bias=False))
    with profiler() as prof:
        for _ in range(6):
            net(torch.rand(3, 10)).sum().backward()
    found = [(name, is_async) for name, is_async, _ in events_of(prof)]
    everyone(found.count(("mpisgd:all_reduce", True)) == 6, f"{found}")
    everyone(("mpisgd:broadcast", True) in found, f"{found}")  # the buckets are made anew
