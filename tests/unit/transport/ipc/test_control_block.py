"""What the ranks of a host say through the control block is seen after all that was written before."""

from __future__ import annotations

import pytest

from mpisgd.transport.ipc import control_block
from mpisgd.transport.ipc.control_block import order_memory


class RecordingLock:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def acquire(self) -> None:
        self.calls.append("acquire")

    def release(self) -> None:
        self.calls.append("release")

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize(("in_order", "fenced"), [(True, False), (False, True)])
def test_where_stores_may_overtake_each_other_a_release_is_followed_by_an_acquire(
    monkeypatch, in_order, fenced
):
    """Accesses move into a critical section from both sides; a release and then an acquire stop all."""
    lock = RecordingLock()
    monkeypatch.setattr(control_block, "_STORES_IN_ORDER", in_order)
    monkeypatch.setattr(control_block, "_fence", lock)
    order_memory()
    assert (("release", "acquire") in zip(lock.calls, lock.calls[1:], strict=False)) == fenced
