"""How long a rank waits for the others at the end of RPC: anew as long as they call it."""

from __future__ import annotations

import time

import pytest

from mpisgd.rpc import quiesce
from mpisgd.threads.wait_registry import WaitReason

LIMIT_S, LOOK_S, BUSY_S = 0.4, 0.1, 1.0


class Calls:
    """Stands for the connections: somebody calls until `busy_s` seconds from now."""

    def __init__(self, busy_s: float) -> None:
        self.last = time.monotonic() + busy_s

    def seconds_since_data(self) -> float:
        return max(0.0, time.monotonic() - self.last)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(quiesce, "LOOK_S", LOOK_S)


def wait(calls: Calls, arrive_s: float = float("inf")) -> tuple[bool, float]:
    """Return whether the others came, and how long that took; they come after `arrive_s`."""
    started = time.monotonic()
    missing = quiesce._wait(
        lambda: time.monotonic() - started > arrive_s, calls, LIMIT_S, WaitReason("rpc.shutdown")
    )
    return missing is None, time.monotonic() - started


def test_a_rank_that_nobody_calls_waits_as_long_as_the_timeout():
    came, waited_s = wait(Calls(busy_s=-1000))
    assert not came
    assert waited_s >= LIMIT_S


def test_a_rank_that_is_called_waits_longer():
    came, waited_s = wait(Calls(busy_s=BUSY_S))
    assert not came
    assert waited_s >= BUSY_S + LIMIT_S - 2 * LOOK_S


def test_the_wait_ends_when_the_others_come():
    assert wait(Calls(busy_s=BUSY_S), arrive_s=0.2)[0]
    assert wait(Calls(busy_s=BUSY_S), arrive_s=2 * LIMIT_S)[0]
