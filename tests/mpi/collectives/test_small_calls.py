"""Small messages feel every call: how many functions of Python one of them takes between ranks of a host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from verdicts import everyone, referee

import mpisgd

pytestmark = pytest.mark.mpi(min_size=2)

CALLS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], object]] = {
    "all_reduce": lambda group, mine, out: mpisgd.all_reduce(mine, group=group),
    "average": lambda group, mine, out: mpisgd.all_reduce(mine, "avg", group),
    "broadcast": lambda group, mine, out: mpisgd.broadcast(mine, group.ranks[0], group),
    "all_gather_into_tensor": lambda group, mine, out: mpisgd.all_gather_into_tensor(out, mine, group),
    "barrier": lambda group, mine, out: mpisgd.barrier(group),
}
MOST = {"all_reduce": 20, "average": 22, "broadcast": 20, "all_gather_into_tensor": 22, "barrier": 14}
REPEATS = 50


def functions_called(call: Callable[[], object]) -> list[str]:
    """Return the names of the functions of Python's that a call takes, itself left out."""
    names: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]


@pytest.mark.parametrize("name", CALLS)
def test_few_functions_are_called(groups, name):
    group = groups["duplicate"]
    if group.shared_memory is None:
        pytest.skip("messages between hosts take many more")
    mine, out = torch.zeros(1), torch.zeros(group.size)
    CALLS[name](group, mine, out)
    # Who comes last does not wait, which takes more of them.
    calls = [functions_called(lambda: CALLS[name](group, mine, out)) for _ in range(REPEATS)]
    fewest = min(referee().allgather(min(calls, key=len)), key=len)
    everyone(len(fewest) <= MOST[name], f"{len(fewest)}: {fewest}")
