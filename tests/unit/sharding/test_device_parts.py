"""Parts of device tensors: the ranks of a group, played by threads, get sums of theirs, and everyone's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpisgd.accelerator.runtime import Cuda, set_runtime
from mpisgd.core.consistency import Operation
from mpisgd.dtypes import ReduceOp
from mpisgd.sharding import device_parts
from mpisgd.sharding.device_parts import DeviceParts

SIZE = 3


class Ranks:
    """Threads that exchange tensors, in the place of a group's collectives.

    Attributes:
        calls: which collectives rank 0 has called.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._barrier = threading.Barrier(SIZE)
        self._shown: list[Tensor] = [torch.empty(0)] * SIZE
        self.calls: list[str] = []
        monkeypatch.setattr(device_parts, "run", self._run)
        monkeypatch.setattr(device_parts, "reduce", self._reduce)
        monkeypatch.setattr(device_parts, "broadcast", self._broadcast)

    def each(self, action: Callable[[Any], None]) -> None:
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                queue = SimpleNamespace(threads_allowed=True)
                members = {"rank": rank, "size": SIZE, "ranks": tuple(range(SIZE))}
                action(SimpleNamespace(**members, queue=queue, streams=None))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    def _everyones(self, rank: int, name: str, tensor: Tensor) -> list[Tensor]:
        self.calls += [name] if rank == 0 else []
        self._shown[rank] = tensor.clone()
        self._barrier.wait()
        everyones = list(self._shown)
        self._barrier.wait()
        return everyones

    def _run(self, row: Any, call: Any, async_op: bool, nbytes: int = 0) -> None:
        everyones = self._everyones(call.group.rank, row.name, call.inputs[0])
        if row.name == "reduce_scatter":
            call.outputs[0].copy_(sum(everyones).chunk(SIZE)[call.group.rank])
        else:
            call.outputs[0].copy_(torch.cat(everyones))

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, group: Any, async_op: bool) -> None:
        everyones = self._everyones(group.rank, "reduce", tensor)
        tensor.copy_(sum(everyones) if group.rank == dst else torch.full_like(tensor, torch.nan))

    def _broadcast(self, tensor: Tensor, src: int, group: Any, async_op: bool) -> None:
        tensor.copy_(self._everyones(group.rank, "broadcast", tensor)[src])


class OneStream(Cuda):
    """The parts lie on the CPU here, whose work has an order."""

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: None)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    set_runtime(OneStream())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    yield Ranks(monkeypatch)
    set_runtime(None)


BIG = 3 * device_parts.SMALL

CUTS: dict[str, tuple[int, Sequence[Sequence[tuple[int, int]]], set[str]]] = {
    "equal slices side by side": (12, [[(0, 4)], [(4, 8)], [(8, 12)]], {"slices"}),
    "equal slices in another order": (12, [[(8, 12)], [(0, 4)], [(4, 8)]], {"slices"}),
    "several buffers of each": (20, [[(0, 4), (12, 17)], [(4, 8)], [(8, 12), (17, 20)]], {"slices"}),
    "a rank with nothing": (7, [[(0, 4)], [], [(4, 7)]], {"slices"}),
    "one has nearly all": (BIG + 5, [[(0, BIG)], [(BIG, BIG + 5)], []], {"apart"}),
}


def buffers_of(flat: Tensor, cuts: Sequence[Sequence[tuple[int, int]]]) -> list[list[Tensor]]:
    return [[flat[start:stop] for start, stop in of_one] for of_one in cuts]


@pytest.mark.parametrize("name", CUTS)
def test_each_rank_gets_the_sum_of_its_parts(ranks, name):
    numel, cuts, how = CUTS[name]
    everyones = [torch.arange(numel, dtype=torch.float64) * (rank + 1) ** 2 for rank in range(SIZE)]
    total = sum(everyones)

    def action(group: Any) -> None:
        flat, taken = everyones[group.rank].clone(), []
        parts = DeviceParts(buffers_of(flat, cuts), group)
        work = parts.reduce_scatter(ReduceOp.SUM, Operation("gradients"), flat.dtype, taken.append)
        assert not taken
        work.wait()
        work.wait()
        (mine,) = taken
        assert torch.equal(mine, torch.cat([*buffers_of(total, cuts)[group.rank], total[:0]]))
        assert torch.equal(flat, everyones[group.rank])

    ranks.each(action)
    assert set(ranks.calls) == ({"reduce_scatter"} if how == {"slices"} else {"reduce"})


@pytest.mark.parametrize("name", CUTS)
def test_all_ranks_get_what_each_owns(ranks, name):
    numel, cuts, how = CUTS[name]
    wanted = torch.arange(numel, dtype=torch.float64)

    def action(group: Any) -> None:
        flat = torch.full((numel,), -1.0, dtype=torch.float64)
        for mine, value in zip(
            buffers_of(flat, cuts)[group.rank], buffers_of(wanted, cuts)[group.rank], strict=True
        ):
            mine.copy_(value)
        DeviceParts(buffers_of(flat, cuts), group).all_gather("parameters").wait()
        assert torch.equal(flat, wanted)

    ranks.each(action)
    assert set(ranks.calls) == ({"all_gather"} if how == {"slices"} else {"broadcast"})


def test_what_travels_may_have_less_precision(ranks):
    values = torch.tensor([1.0, 2.0, 3.001], dtype=torch.float64)

    def action(group: Any) -> None:
        taken: list[Tensor] = []
        parts = DeviceParts([[values[k : k + 1]] for k in range(SIZE)], group)
        parts.reduce_scatter(ReduceOp.SUM, Operation("gradients"), torch.bfloat16, taken.append).wait()
        assert taken[0].dtype is torch.bfloat16
        assert taken[0].item() == (values[group.rank].to(torch.bfloat16) * 3).item()

    ranks.each(action)
