"""Messages in flight, over a communicator that needs no MPI: how often they are asked after, and by whom."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch

from mpisgd.errors import MpiFailed, PeerLost
from mpisgd.threads import waiting
from mpisgd.transport.messages.point_to_point import PointToPoint


class Wire:
    """A communicator whose messages arrive when the test says so; counts how often it is asked."""

    rank, size, global_ranks = 1, 3, (0, 10, 20)
    only_thread = None

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.errors: dict[int, Exception] = {}
        self.num_polls = 0
        self._numbers = itertools.count()

    def irecv(self, *about: Any) -> int:
        return next(self._numbers)

    isend = irecv

    def poll_one(self, request: int) -> tuple[int, int] | None:
        self.num_polls += 1
        if request in self.errors:
            raise self.errors[request]
        return (0, 4) if request in self.arrived else None


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def messages(wire):
    return PointToPoint(wire, timeout_s=5.0, threads_allowed=True)


def receive(messages: PointToPoint, src: int | None = 0) -> Any:
    return messages.receive("irecv", torch.zeros(1), src, 0, "tensors", lambda nbytes: None)


def test_many_messages_in_flight_cost_as_much_each_as_a_few(wire, messages):
    """Above 64 each new one polled all: 2,000 messages took 15 s."""
    works = [receive(messages) for _ in range(1000)]
    assert wire.num_polls < 5 * len(works)
    wire.arrived.update(range(1000))
    for _ in range(1000):  # those that nobody waits for end all the same, and their memory with them
        receive(messages)
    assert sum(work._done for work in works) > 900


def test_a_receive_from_anybody_waits_for_all_others(messages):
    assert receive(messages, None).message.partners == (0, 20)
    assert receive(messages, 1).message.partners == (10,)


def test_an_error_in_one_message_leaves_the_futures_of_others_alone(wire, messages):
    """It ended the thread that polls: no future of a message ever completed again."""
    broken, sound, later = receive(messages), receive(messages), receive(messages)
    wire.errors[0] = ValueError("not an error of ours")
    failed, came = broken.get_future(), sound.get_future()
    wire.arrived.add(1)
    assert came.wait() == "tensors"
    with pytest.raises(ValueError, match="not an error of ours"):
        failed.wait()
    after = later.get_future()
    wire.arrived.add(2)
    assert after.wait() == "tensors"


def test_when_all_waits_are_cancelled_the_thread_neither_ends_nor_spins(wire, messages):
    """`PeerLost` made it poll without a pause; any other reason ended it."""
    for reason in (PeerLost("lost"), MpiFailed("revoked")):
        waiting.cancel_all(reason)
        try:
            work = receive(messages)
            future = work.get_future()
            time.sleep(0.2)
            before = wire.num_polls
            time.sleep(0.2)
            assert wire.num_polls - before < 2000  # each spun round took 2 us
            wire.arrived.add(work._request)
            assert future.wait() == "tensors"
        finally:
            waiting.allow_waits()


def test_a_callback_may_wait_for_the_future_of_another_message(wire, messages):
    """It waited on the thread that was to complete it."""
    first, second = receive(messages), receive(messages)
    future = second.get_future()
    threading.Timer(0.1, lambda: wire.arrived.add(1)).start()
    chain = first.get_future().then(lambda _: future.wait())
    wire.arrived.add(0)
    assert chain.wait() == "tensors"
