"""`Rendezvous`: whoever gives up, and whenever, all go on together or none does."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import pytest

from mpisgd.transport.messages.rendezvous import Rendezvous


class Wires:
    """Messages between ranks, in order; receives take them in the order in which they were started."""

    def __init__(self) -> None:
        self.receives: dict[Any, deque[bytearray]] = defaultdict(deque)
        self.sent: dict[Any, deque[bytes]] = defaultdict(deque)
        self.waiting: set[int] = set()  # receives, by their memory

    def deliver(self, place: Any) -> None:
        while self.receives[place] and self.sent[place]:
            memory = self.receives[place].popleft()
            memory[:] = self.sent[place].popleft()
            self.waiting.discard(id(memory))


class Wire:
    """What a rank has of them: the part of a communicator that is used."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.wires, self.rank, self.global_ranks = wires, rank, range(size)
        self.kept: list[Any] = []

    def persistent(self, send: bytearray, dst: int, recv: bytearray, src: int, tag: int) -> Any:
        return send, (self.rank, dst, tag), recv, (src, self.rank, tag)

    def start(self, requests: Any) -> None:
        send, there, recv, here = requests
        self.wires.waiting.add(id(recv))
        self.wires.receives[here].append(recv)
        self.wires.sent[there].append(bytes(send))
        self.wires.deliver(here)
        self.wires.deliver(there)

    def poll(self, requests: Any) -> bool:
        return id(requests[2]) not in self.wires.waiting

    def release(self, requests: Any) -> None:
        assert self.poll(requests)

    def abandon(self, requests: Any, memory: Any) -> None:
        self.kept.append(memory)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_nobody_goes_on_with_what_others_have_given_up(size):
    for seed in range(200):
        draw = random.Random(seed)
        wires = Wires()
        ranks = [Wire(wires, rank, size) for rank in range(size)]
        meetings: list[Rendezvous | None] = [None] * size
        patience = [draw.randint(0, 3) for _ in range(size)]  # times that it gives up
        over: set[int] = set()
        while len(over) < size:
            rank = draw.choice([each for each in range(size) if each not in over])
            meeting = meetings[rank]
            if meeting is None:
                meetings[rank] = Rendezvous(ranks[rank], range(size), 0, 7)
            elif meeting.advance():
                assert meeting.extremes() == (7, 7)
                assert all(other is not None for other in meetings), f"seed {seed}: {rank} goes on alone"
                assert all(other.all_have_come for other in meetings), f"seed {seed}: {rank} goes on early"
                over.add(rank)
            elif patience[rank] and not meeting.all_have_come and draw.random() < 0.3:
                patience[rank] -= 1
                meeting.close()
                meetings[rank] = None
