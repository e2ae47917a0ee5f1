"""`Network`: the messages between ranks that are threads of one process, and what they meet for.

A message takes a time that the seed draws. Those of one rank to another arrive in the order in which they
were sent, as MPI says; those of different ranks overtake each other. A message is copied when it is sent, or
only when it is received: both are allowed to MPI, and a program may rely on neither.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mpisgd.errors import CollectiveTimeout, MpiFailed
from mpisgd.transport.loopback.scheduler import SeededScheduler

__all__ = ["Context", "Meeting", "Memory", "Network", "Request"]

LONGEST_WAY_S = 0.001
IMMEDIATE_SHARE = 0.5  # of the messages that are copied at once


class Memory(NamedTuple):
    """Some bytes that a request reads or writes; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: object

    @classmethod
    def of(cls, given: Tensor | bytearray) -> "Memory":
        """Return the memory of a contiguous tensor or of a bytearray."""
        if isinstance(given, Tensor):
            return cls(given.data_ptr(), given.nbytes, given)
        array = (ctypes.c_char * len(given)).from_buffer(given)
        return cls(ctypes.addressof(array), len(given), array)

    def copy(self) -> "Memory":
        """Return a copy."""
        return Memory.of(bytearray(ctypes.string_at(self.address, self.nbytes)))

    def fill_from(self, other: "Memory") -> None:
        """Copy another one's bytes to the beginning of this."""
        ctypes.memmove(self.address, other.address, other.nbytes)


class Request:
    """Something that was started; it is over when `is_done`.

    Attributes:
        source: the rank that a message has come from.
        nbytes: that were received.
    """

    def __init__(self, test: Callable[[], bool] | None = None) -> None:
        self.is_done = False
        self.source = 0
        self.nbytes = 0
        self.error: Exception | None = None
        self._test = test

    def test(self) -> bool:
        """Return whether it is over, moving it along.

        Raises:
            MpiFailed: it went wrong.
        """
        if not self.is_done and self._test is not None:
            self.is_done = self._test()
        if self.error is not None:
            raise self.error
        return self.is_done


class _Message(NamedTuple):
    src: int
    tag: int
    memory: Memory
    arrives_s: float
    request: Request


class _Receive(NamedTuple):
    src: int | None
    tag: int
    memory: Memory
    request: Request


class Meeting:
    """What the ranks of a context do together once: each brings something, and all see what was brought."""

    def __init__(self, kind: str, size: int, scheduler: SeededScheduler) -> None:
        self.kind = kind
        self._scheduler = scheduler
        self.brought: dict[int, Any] = {}
        self.made: dict[Any, Any] = {}  # by whoever is first to need it
        self._size = size

    def bring(self, kind: str, rank: int, what: Any) -> None:
        """Come with something.

        Raises:
            MpiFailed: others have met for another kind of thing; MPI would hang, or mix them up.
        """
        if kind != self.kind:
            raise MpiFailed(f"rank {rank} calls {kind} where others have called {self.kind}")
        self.brought[rank] = what
        self._scheduler.num_events += 1

    def is_complete(self) -> bool:
        """Return whether all have come."""
        return len(self.brought) == self._size

    @property
    def all(self) -> list[Any]:
        """What the ranks have brought, in their order."""
        return [self.brought[rank] for rank in sorted(self.brought)]


class Context:
    """What the ranks of one communicator share.

    Attributes:
        ranks: the job's ranks that they are, in their order.
        meetings: in the order of the calls.
    """

    def __init__(self, network: "Network", ranks: Sequence[int]) -> None:
        self.network = network
        self.ranks = tuple(ranks)
        network.contexts.add(self)
        self.meetings: list[Meeting] = []
        self._apart: dict[Any, Meeting] = {}
        self._sent: dict[int, list[_Message]] = {rank: [] for rank in range(len(ranks))}
        self._receives: dict[int, list[_Receive]] = {rank: [] for rank in range(len(ranks))}
        self._latest: dict[tuple[int, int], float] = {}

    def meeting(self, number: int, kind: str) -> Meeting:
        """Return the meeting of this number, which the first that asks makes."""
        if number == len(self.meetings):
            self.meetings.append(Meeting(kind, len(self.ranks), self.network.scheduler))
        return self.meetings[number]

    def meeting_apart(self, key: Any, kind: str, size: int) -> Meeting:
        """Return a meeting of some of the ranks, which the first that asks makes."""
        if key not in self._apart:
            self._apart[key] = Meeting(kind, size, self.network.scheduler)
        return self._apart[key]

    def send(self, src: int, dst: int, tag: int, memory: Memory) -> Request:
        """Start sending; the request is over when the memory may be changed."""
        scheduler = self.network.scheduler
        scheduler.num_events += 1
        request = Request()
        if scheduler.random.random() < IMMEDIATE_SHARE:
            memory, request.is_done = memory.copy(), True
        way_s = scheduler.random.random() * LONGEST_WAY_S
        arrives_s = max(scheduler.now_s() + way_s, self._latest.get((src, dst), 0.0))
        self._latest[src, dst] = arrives_s
        self._sent[dst].append(_Message(src, tag, memory, arrives_s, request))
        scheduler.arrives(arrives_s)
        return request

    def receive(self, dst: int, src: int | None, tag: int, memory: Memory) -> Request:
        """Start receiving; `src` None: from whoever sends first."""

        def is_over() -> bool:
            self.match(dst)
            return request.is_done

        request = Request(is_over)
        self._receives[dst].append(_Receive(src, tag, memory, request))
        return request

    def cancel(self, dst: int, request: Request) -> bool:
        """Receive nothing by this request any more; return whether nothing has come yet."""
        self.match(dst)
        left = [receive for receive in self._receives[dst] if receive.request is not request]
        self._receives[dst] = left
        cancelled, request.is_done = not request.is_done, True
        return cancelled

    def waiting(self, dst: int, tag: int | None) -> _Message | None:
        """Return a message that has arrived and that nobody receives."""
        self.match(dst)
        return next((m for m in self._arrived(dst) if tag is None or m.tag == tag), None)

    def _arrived(self, dst: int) -> list[_Message]:
        """Return what has arrived, in that order."""
        here = [m for m in self._sent[dst] if m.arrives_s <= self.network.scheduler.now_s()]
        return sorted(here, key=lambda message: message.arrives_s)

    def match(self, dst: int) -> None:
        """Give what has arrived to the receives that wait for it, the first to the first."""
        arrived = self._arrived(dst)
        for receive in list(self._receives[dst]) if arrived else ():
            fits = (m for m in arrived if m.tag == receive.tag and receive.src in (None, m.src))
            if (message := next(fits, None)) is not None:
                arrived.remove(message)
                self._sent[dst].remove(message)
                self.network.scheduler.num_events += 1
                self._receives[dst].remove(receive)
                _deliver(message, receive)


def _deliver(message: _Message, receive: _Receive) -> None:
    if message.memory.nbytes > receive.memory.nbytes:
        receive.request.error = MpiFailed(
            f"a message of {message.memory.nbytes} bytes from rank {message.src} was truncated: "
            f"{receive.memory.nbytes} were to be received"
        )
    else:
        receive.memory.fill_from(message.memory)
    receive.request.source, receive.request.nbytes = message.src, message.memory.nbytes
    receive.request.is_done = message.request.is_done = True


class Network:
    """What all ranks of a run share.

    Args:
        scheduler: decides who runs, and draws.
        hosts: of each rank, the number of its host.
        timeout_s: how long a rank waits in what MPI would block in.
    """

    def __init__(self, scheduler: SeededScheduler, hosts: Sequence[int], timeout_s: float) -> None:
        self.scheduler = scheduler
        self.hosts = tuple(hosts)
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.world = Context(self, range(len(hosts)))
        self._timeout_s = timeout_s

    def progress(self, rank: int) -> None:
        """Receive what has arrived for a rank of the job, on any communicator; MPI does so in any call."""
        for context in list(self.contexts):
            if rank in context.ranks:
                context.match(context.ranks.index(rank))

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait as a blocking call of MPI does, which has no limit; here it has one.

        Raises:
            CollectiveTimeout: the others did not come.
        """
        if not ready() and not self.scheduler.wait(ready, self._timeout_s):
            raise CollectiveTimeout(f"loopback: {what} was not over after {self._timeout_s:g} s")
