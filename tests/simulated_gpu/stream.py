"""Streams: queues of tasks that are done in order, later, when somebody waits for them or by themselves.

Nothing but an event orders two streams. A wait does what it has to and no more, so a stream that forgets to
wait for another one runs before it. What nobody waits for begins `latency_s` after it was queued, in an order
that is drawn: a real device needs nobody to wait for it either.

    stream A   | fill | record e |          wait for B: the host runs  copy? no: first what e stands for
    stream B   | wait e | copy |                                       fill, then copy
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mpisgd.threads import scheduling
from mpisgd.transport.loopback.scheduler import Stopped

__all__ = ["Event", "Kernel", "Sleep", "Streams", "Task"]

POOL = 32  # of streams, as torch has; a program that makes more gets old ones
POLL_S = 0.0005
SIMULATED_POLL_S = 0.004  # of the ranks' own time: what they wait for by timeouts is over soon


class Task(Protocol):
    """Something that a stream has to do."""

    def poll(self) -> bool:
        """Go on with it, and return whether it is done. Called when all before it is done."""


class Kernel:
    """A function that takes no time of its own."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def poll(self) -> bool:
        self._run()
        return True


class Sleep:
    """Keeps a stream busy."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None

    def poll(self) -> bool:
        self._end = self._end or time.monotonic() + self._seconds
        return time.monotonic() >= self._end


class Stream:
    """A queue; `done` of all tasks that ever were in it are done."""

    def __init__(self, device: int, number: int) -> None:
        self.device, self.number = device, number
        self.tasks: deque[tuple[float, Task]] = deque()
        self.done = 0
        self.error: Exception | None = None

    @property
    def end(self) -> int:
        return self.done + len(self.tasks)

    def advance(self, place: int) -> bool:
        """Do what can be done up to a place; return whether it is reached."""
        while self.done < place:
            try:
                if not self.tasks[0][1].poll():
                    return False
            except Exception as exc:  # found by who waits for this stream next, as with CUDA
                self.error = self.error or exc
            self.tasks.popleft()
            self.done += 1
        return True


class Event:
    """A place in a stream: at first that of its first record."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def poll(self) -> bool:
        """As a task of another stream: go on with this one, up to here."""
        return self.stream is None or self.stream.advance(self.place)

    def at(self) -> Event:
        """The same place, whatever is recorded later."""
        copy = Event()
        copy.stream, copy.place = self.stream, self.place
        return copy


class Streams:
    """All streams and events of this process, and the thread that is the device.

    Attributes:
        latency_s: when the device begins, by itself, with what nobody waits for.
        num_syncs: how often the host has waited for a stream or an event.
        capturing: the stream whose work is recorded into a graph, and not done.
        relaxed: threads that may ask for events meanwhile; see `asked`.
        is_spoilt: whether another thread has asked.
        seed: of the order in which it then takes streams.
    """

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.latency_s = 0.05
        self.num_syncs = 0
        self.capturing: Stream | None = None
        self.relaxed: set[int] = set()
        self.is_spoilt = False
        self.lock = threading.RLock()
        self._streams: dict[tuple[int, int], Stream] = {}
        self._made = [itertools.count() for _ in range(num_devices)]
        self._events: dict[int, Event] = {}
        self._handles = itertools.count(1)
        self._random = random.Random(0)
        self._wake = threading.Condition(self.lock)
        self._is_idle = False
        threading.Thread(target=self._work, name="simulated GPU", daemon=True).start()

    def seed(self, seed: int) -> None:
        self._random = random.Random(seed)

    def get(self, device: int, number: int) -> Stream:
        """Return a stream by its number; 0 is the default one."""
        known = self._streams.get((device, number))
        if known is not None:
            return known
        with self.lock:  # the device looks through them
            return self._streams.setdefault((device, number), Stream(device, number))

    def add(self, stream: Stream, task: Task) -> Event:
        """Queue a task; return the event when it is done."""
        with self.lock:
            if stream is self.capturing:
                return Event()
            stream.tasks.append((time.monotonic(), task))
            if self._is_idle:  # else it looks again soon
                self._wake.notify()
            return self.record(stream)

    def record(self, stream: Stream) -> Event:
        with self.lock:
            event = Event()
            event.stream, event.place = stream, stream.end
            return event

    def query(self, event: Event) -> bool:
        """Return whether an event has come, without doing anything for it."""
        return event.stream is None or event.stream.done >= event.place

    def asked(self, event: Event) -> bool:
        """As `query`, for the program: CUDA ends a capture where a thread asks that is not `relaxed`."""
        if self.capturing is not None and threading.get_ident() not in self.relaxed:
            self.is_spoilt = True
        return self.query(event)

    def synchronize(self, event: Event) -> None:
        """Let the host wait for an event, and do what it stands for meanwhile."""
        self.num_syncs += 1
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        while True:
            with self.lock:
                if event.poll():
                    break
            if scheduling.scheduler() is not None:  # ranks are threads: the others go on meanwhile
                scheduling.sleep(SIMULATED_POLL_S)
            time.sleep(POLL_S)
        if event.stream is not None and event.stream.error is not None:
            error, event.stream.error = event.stream.error, None
            raise RuntimeError(f"a kernel of the simulated GPU failed: {error!r}") from error

    def synchronize_device(self, device: int) -> None:
        with self.lock:
            events = [self.record(stream) for stream in self._streams.values() if stream.device == device]
        for event in events:
            self.synchronize(event)

    def _work(self) -> None:
        """The device: goes on with one stream after the other, when its first task is old enough."""
        while True:
            with self.lock:
                busy = [stream for stream in self._streams.values() if stream.tasks]
                old = time.monotonic() - self.latency_s
                due = [stream for stream in busy if stream.tasks[0][0] <= old]
                moved = False
                if due:
                    stream = self._random.choice(due)
                    before = stream.done
                    moved = stream.advance(stream.done + 1) or stream.done > before
                if not moved:
                    self._is_idle = not busy
                    self._wake.wait(None if not busy else max(POLL_S, self.latency_s / 50))
                    self._is_idle = False

    # -- what guard.cpp calls -------------------------------------------------------------------------------

    def calls(self) -> dict[str, Callable[..., object]]:
        """Return the functions for `guard.register`, without the allocator's."""
        return {
            "new_stream": lambda device: 1 + next(self._made[device]) % POOL,
            "record": self._record,
            "block": lambda event, device, number: self._block(self._events[event], device, number),
            "query_event": lambda event: int(self.asked(self._events[event])),
            "destroy_event": lambda event: self._events.pop(event, None) and None,
            "synchronize_event": lambda event: self._synchronize(self._events[event].at()),
            "query_stream": lambda device, number: int(not self.get(device, number).tasks),
            "synchronize_stream": lambda device, number: self._synchronize(
                self.record(self.get(device, number))
            ),
            "synchronize_device": self.synchronize_device,
        }

    def _synchronize(self, event: Event) -> None:
        """Wait, where no error can be raised: a rank that is a thread, and ends, does so at its next wait."""
        with contextlib.suppress(Stopped):
            self.synchronize(event)

    def _record(self, handle: int | None, device: int, number: int) -> int:
        with self.lock:
            handle = handle or next(self._handles)
            event = self._events.setdefault(handle, Event())
            event.stream = self.get(device, number)
            event.place = event.stream.end
            return handle

    def _block(self, event: Event, device: int, number: int) -> None:
        self.add(self.get(device, number), event.at())
