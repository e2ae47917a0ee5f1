"""`Recorder`: takes events from any thread; a thread of its own writes them to a file.

Training never waits for the disk: events beyond the capacity are counted and dropped.
"""

import collections
import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mpisgd.accelerator.runtime import runtime
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.timeline.clock import Clock
from mpisgd.timeline.files import CLOSING, OPENING, Event, as_line
from mpisgd.tracing import Track

__all__ = ["Recorder"]

CAPACITY = 100_000  # events; some 300 bytes each
PERIOD_S = 0.2


class Recorder:
    """The sink of one rank, and its file.

    Args:
        path: of the file, which is overwritten.
        rank: in the job.
        clock: of this rank.
        mark_cycles: whether to record the cycles of Horovod's negotiation.
        capacity: how many events to buffer until they are written.

    Attributes:
        lost: how many events were dropped.
    """

    def __init__(
        self, path: Path, rank: int, clock: Clock, *, mark_cycles: bool = False, capacity: int = CAPACITY
    ) -> None:
        self.path = path
        self.lost = 0
        self.mark_cycles = mark_cycles
        self._rank = rank
        self._clock = clock
        self._capacity = capacity
        self._events: collections.deque[Callable[[], list[Event]]] = collections.deque()
        self._samples: collections.deque[Event] = collections.deque()  # few, and within no capacity
        self._threads_of: dict[Track, int] = {}
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._process = psutil.Process()
        self._sent: collections.Counter[int] = collections.Counter()  # bytes, by destination
        self._counting = threading.Lock()
        self._levels: dict[str, Mapping[str, int]] = {}  # what was written last
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._file.writelines([OPENING, *map(as_line, self._head())])
        self._file.flush()
        self._thread = ServiceThread("mpisgd timeline", self._serve)
        self._thread.start()

    def _head(self) -> list[Event]:
        """Return the first events: rank, host, process and clock."""
        clock = {"offset_us": self._clock.offset_ns / 1000, "error_us": self._clock.error_ns / 1000}
        about = {"rank": self._rank, "host": socket.gethostname(), "process": os.getpid(), **clock}
        return [
            self._meta("process_name", {"name": f"rank {self._rank}"}),
            self._meta("process_sort_index", {"sort_index": self._rank}),
            self._meta("mpisgd", about),
        ]

    def _meta(self, name: str, args: Mapping[str, Any], tid: int = 0) -> Event:
        return {"name": name, "ph": "M", "pid": self._rank, "tid": tid, "args": args}

    # -- what any thread calls --------------------------------------------------------------------------

    def span(
        self, track: Track, name: str, begin_ns: int, end_ns: int, cat: str, args: Mapping[str, Any]
    ) -> None:
        """See `mpisgd.tracing.Sink`."""
        self._put(
            lambda: self._on_track(
                track, name, "X", begin_ns, cat=cat, dur=(end_ns - begin_ns) / 1000, args=args
            )
        )

    def overlapping(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> None:
        """See `mpisgd.tracing.Sink`."""
        self._put(lambda: self._as_phases(cat, key, phases, args))

    def instant(self, track: Track, name: str, at_ns: int) -> None:
        """See `mpisgd.tracing.Sink`."""
        if self.mark_cycles or not name.startswith("CYCLE"):
            self._put(lambda: self._on_track(track, name, "i", at_ns, s="t"))

    def sent(self, dst: int, nbytes: int) -> None:
        """See `mpisgd.tracing.Sink`."""
        with self._counting:
            self._sent[dst] += nbytes

    def flush(self) -> None:
        """Write the buffered events."""
        with self._writing:
            try:
                while self._samples or self._events:
                    events = [self._samples.popleft()] if self._samples else self._events.popleft()()
                    if self._file.closed:
                        self.lost += 1
                    else:
                        self._file.writelines(map(as_line, events))
                if not self._file.closed:
                    self._file.flush()
            except OSError as exc:
                self._stop_after(exc)

    def _stop_after(self, exc: OSError) -> None:
        """Stop recording; the program continues."""
        self._closed.set()
        print(f"mpisgd: rank {self._rank} records no more: {self.path}: {exc.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """Write the rest and close the file."""
        self._closed.set()
        self._thread.join()
        self._sample()
        self.flush()
        with self._writing:
            try:
                if not self._file.closed:
                    self._file.write(as_line(self._meta("lost", {"events": self.lost})) + CLOSING)
                    self._file.close()
            except OSError as exc:
                self._stop_after(exc)

    def _put(self, event: Callable[[], list[Event]]) -> None:
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            self.lost += 1

    # -- the thread -------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        self._sample()
        self.flush()
        return not self._closed.wait(PERIOD_S)

    def _sample(self) -> None:
        """Note how much memory this process has, and what it has sent, unless they are as before."""
        memory = self._process.memory_info()
        shared = getattr(memory, "shared", 0)
        levels = {"own": memory.rss - shared, "shared": shared, "device": runtime().memory_in_use()}
        with self._counting:
            sent = {f"to rank {dst}": self._sent[dst] for dst in sorted(self._sent)}
        for name, args in ("memory", levels), ("bytes sent", sent):
            if args and args != self._levels.get(name):
                self._levels[name] = args
                event = self._event(name, "C", time.monotonic_ns(), args=args)
                self._samples.append(event)

    def _as_phases(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> list[Event]:
        """Return Chrome's "async" events: those with the same key are drawn in one row."""
        common: dict[str, Any] = {"cat": cat, "id2": {"local": key}}
        events: list[Event] = []
        within: list[tuple[str, int]] = []

        def end_what_does_not_hold(until_ns: float) -> None:
            while within and within[-1][1] < until_ns:
                name, end_ns = within.pop()
                events.append(self._event(name, "e", end_ns, **common))

        for name, begin_ns, end_ns in phases:
            end_what_does_not_hold(end_ns)
            within.append((name, end_ns))
            more: dict[str, Any] = {} if events else {"args": args}
            events.append(self._event(name, "b", begin_ns, **common, **more))
        end_what_does_not_hold(math.inf)
        return events

    def _event(self, name: str, kind: str, at_ns: int, tid: int = 0, **more: Any) -> Event:
        common = {"name": name, "ph": kind, "ts": self._clock.to_us(at_ns), "pid": self._rank, "tid": tid}
        return common | more

    def _on_track(self, track: Track, name: str, kind: str, at_ns: int, **more: Any) -> list[Event]:
        """Return an event, after the one that names its track where that is new."""
        naming: list[Event] = []
        if track not in self._threads_of:
            tid = self._threads_of[track] = len(self._threads_of) + 1
            naming = [self._meta("thread_name", {"name": track.name, "ranks": track.ranks}, tid)]
        return [*naming, self._event(name, kind, at_ns, self._threads_of[track], **more)]
