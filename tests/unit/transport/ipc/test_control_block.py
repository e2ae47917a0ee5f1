"""What the ranks of a host say through the control block is seen after all that was written before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from mpisgd.threads import waiting
from mpisgd.transport.ipc import control_block
from mpisgd.transport.ipc.control_block import ARRIVALS, CONTROL_BYTES, SLEEPERS, ControlBlock, order_memory
from mpisgd.transport.ipc.segment import Segment


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


SHARE_BYTES = 2 * CONTROL_BYTES
LONG_S = 10.0


def blocks_of(size: int) -> list[ControlBlock]:
    """The control block as each of the ranks of a host sees it; all are threads of this process."""
    segment = Segment(-1, SHARE_BYTES, size)
    blocks = [ControlBlock(segment, rank, range(size), lambda: None) for rank in range(size)]
    if not blocks[0]._futex.available:
        pytest.skip("this system has no futex")
    return blocks


@pytest.fixture
def scarce_cores() -> Iterator[None]:
    before = waiting.is_oversubscribed()
    waiting.set_oversubscribed(True)
    yield
    waiting.set_oversubscribed(before)


@pytest.mark.usefixtures("scarce_cores")
@pytest.mark.parametrize("size", [2, 8, 9, 20])
def test_the_kernel_is_asked_to_wake_only_where_a_rank_sleeps(monkeypatch, size):
    """One rank after the other sleeps until the last one arrives, which has called the kernel for nobody."""
    last, *others = reversed(blocks_of(size))
    woken: list[int] = []
    wake = last._futex.wake
    monkeypatch.setattr(last._futex, "wake", lambda word: (woken.append(word), wake(word)))
    last.publish(40, 1)
    assert last._sleepers is None or not woken
    woken.clear()
    for other in others:
        other.arrivals = 1
        asleep = threading.Thread(
            target=other.sleep_until_reached, args=(ARRIVALS, [size - 1], 1, LONG_S), daemon=True
        )
        began = time.monotonic()
        asleep.start()
        while (
            last._sleepers is not None and not last._bytes[(size - 1) * SHARE_BYTES + SLEEPERS + other._rank]
        ):
            time.sleep(0.001)
        last.publish(ARRIVALS, 1)
        asleep.join(LONG_S)
        assert time.monotonic() - began < LONG_S / 2
        assert woken
        assert not any(last._bytes[(size - 1) * SHARE_BYTES + SLEEPERS + rank] for rank in range(size))
        woken.clear()
        last._words[last._mine + ARRIVALS] = 0


@pytest.mark.usefixtures("scarce_cores")
def test_nobody_is_left_asleep():
    """Two processes that sleep at once, 20,000 times: who is not woken sleeps until its own limit."""
    blocks, rounds = blocks_of(2), 20000

    def longest_sleep_s(block: ControlBlock) -> float:
        longest_s = 0.0
        for number in range(1, rounds + 1):
            block.publish(40, number)
            while not block.reached(40, [0, 1], number):
                began = time.monotonic()
                block.sleep_until_reached(40, [0, 1], number, LONG_S)
                longest_s = max(longest_s, time.monotonic() - began)
                if longest_s >= LONG_S:
                    return longest_s
        return longest_s

    child = os.fork()
    if child == 0:
        os._exit(longest_sleep_s(blocks[1]) >= LONG_S)
    mine_s = longest_sleep_s(blocks[0])
    assert os.waitpid(child, 0)[1] == 0
    assert mine_s < LONG_S


def test_of_more_ranks_than_there_is_room_for_nobody_says_that_it_sleeps(monkeypatch):
    """The bytes after the room are other memory; all are woken then."""
    monkeypatch.setattr(control_block, "SLEEPERS", CONTROL_BYTES - 4)
    first, *_, last = blocks_of(5)
    seen: list[bytes] = []
    monkeypatch.setattr(last._futex, "wait", lambda *_: seen.append(bytes(first._bytes[: CONTROL_BYTES + 8])))
    last.sleep_until_reached(40, [0], 1, 0.001)
    assert seen == [bytes(CONTROL_BYTES + 8)]
    assert first._somebody_sleeps()


@pytest.mark.parametrize("scarce", [True, False])
def test_ranks_agree_soon_only_where_all_have_come_with_the_same_digest(scarce):
    """And what one of them has left behind two exchanges ago is not taken for its digest now."""
    before = waiting.is_oversubscribed()
    waiting.set_oversubscribed(scarce)
    try:
        first, second, third = blocks_of(3)
        for digest in (7, 8):
            first.start(digest)
            second.start(digest)
            assert not first.agree_soon()
            third.start(digest)
            assert all(block.agree_soon() for block in (first, second, third))
        first.start(9)
        assert not first.agree_soon()
        second.start(9)
        third.start(10)
        assert not any(block.agree_soon() for block in (first, second, third))
        assert all(block.advance() and block.extremes() == (9, 10) for block in (first, second, third))
    finally:
        waiting.set_oversubscribed(before)
