"""A collective inside a future's callback, waited for there: PowerSGD does that, and must never hang."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from closed_form import assert_equal

F64 = torch.float64


def blocking(tensor: torch.Tensor, pg: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=pg)


def waited(tensor: torch.Tensor, pg: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=pg, async_op=True).wait()


def waited_for_its_future(tensor: torch.Tensor, pg: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=pg, async_op=True).get_future().wait()


@pytest.mark.parametrize("inside", [blocking, waited, waited_for_its_future])
@pytest.mark.parametrize(("length", "times"), [(1, 12), (3000, 6), (200_000, 2)])
def test_collectives_inside_callbacks_with_others_behind_them(pg, inside, length, times):
    """Three in a chain, each in the callback of the one before, and one issued behind while they run."""
    n, ends, behind = float(pg.size()), [], []
    for i in range(times):
        x = torch.full((length,), i + 1.0, dtype=F64)
        future = dist.all_reduce(x, group=pg, async_op=True).get_future()
        ends.append(future.then(again(inside, pg)).then(again(inside, pg)))
        y = torch.full((length,), i + 2.0, dtype=F64)
        behind.append((dist.all_reduce(y, group=pg, async_op=True), y))
    for i, end in enumerate(ends):
        assert_equal(end.wait(), torch.full((length,), (i + 1.0) * n**3, dtype=F64))
    for i, (work, y) in enumerate(behind):
        work.wait()
        assert_equal(y, torch.full((length,), (i + 2.0) * n, dtype=F64))


def again(
    inside: Callable[[torch.Tensor, dist.ProcessGroup], None], pg: dist.ProcessGroup
) -> Callable[[torch.futures.Future], torch.Tensor]:
    def callback(done: torch.futures.Future) -> torch.Tensor:
        value = done.value()
        tensor = (value[0] if isinstance(value, list) else value).clone()
        inside(tensor, pg)
        return tensor

    return callback


def test_an_error_in_a_callback_belongs_to_who_waits_for_it(pg):
    def broken(_: torch.futures.Future) -> None:
        raise ZeroDivisionError("in the callback")

    end = dist.all_reduce(torch.ones(3), group=pg, async_op=True).get_future().then(broken)
    with pytest.raises(RuntimeError, match="in the callback"):
        end.wait()
    dist.all_reduce(x := torch.ones(3), group=pg)
    assert_equal(x, torch.full((3,), float(pg.size())))
