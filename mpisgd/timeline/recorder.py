"""`Recorder`: takes events from any thread, and has a thread of its own that writes them down.

Training never waits for the disk: what does not fit into memory is counted instead of kept.
"""

import collections
import contextlib
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.timeline.clock import Clock
from mpisgd.timeline.files import Event, as_line, closing_line
from mpisgd.tracing import Track

__all__ = ["Recorder"]

CAPACITY = 100_000  # notes; some 300 bytes each
PERIOD_S = 0.2


class Recorder:
    """The sink of one rank, and its file.

    Args:
        path: of the file, made anew.
        rank: in the job.
        clock: of this rank.
        mark_cycles: whether moments are noted, too.
        capacity: how many notes to keep until they are written.

    Attributes:
        lost: how many did not fit.
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
        self._notes: collections.deque[Callable[[], list[Event]]] = collections.deque()
        self._threads_of: dict[Track, int] = {}
        self._writing = threading.Lock()
        self._over = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._file.write("[\n")
        self._file.writelines(map(as_line, self._head()))
        self._file.flush()
        self._thread = threading.Thread(target=self._serve, name="mpisgd timeline", daemon=True)
        self._thread.start()

    def _head(self) -> list[Event]:
        """Say whose file it is, and by which clock."""
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
        self._put(lambda: self._as_span(track, name, begin_ns, end_ns, cat, args))

    def overlapping(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> None:
        """See `mpisgd.tracing.Sink`."""
        self._put(lambda: self._as_phases(cat, key, phases, args))

    def instant(self, track: Track, name: str, at_ns: int) -> None:
        """See `mpisgd.tracing.Sink`."""
        if self.mark_cycles or not name.startswith("CYCLE"):
            self._put(lambda: self._as_instant(track, name, at_ns))

    def flush(self) -> None:
        """Write down what was noted so far."""
        with self._writing:
            try:
                while self._notes:
                    self._write(self._notes.popleft()())
                if not self._file.closed:
                    self._file.flush()
            except OSError as exc:
                self._give_up(exc)

    def _write(self, events: list[Event]) -> None:
        if self._file.closed:
            self.lost += 1
        else:
            self._file.writelines(map(as_line, events))

    def _give_up(self, exc: OSError) -> None:
        """The program goes on where its timeline cannot."""
        self._over.set()
        print(f"mpisgd: rank {self._rank} records no more: {self.path}: {exc.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """Write the rest, and end the file."""
        self._over.set()
        self._thread.join()
        self.flush()
        with self._writing:
            try:
                if not self._file.closed:
                    self._file.write(as_line(self._meta("lost", {"events": self.lost})) + closing_line())
                    self._file.close()
            except OSError as exc:
                self._give_up(exc)

    def _put(self, note: Callable[[], list[Event]]) -> None:
        if len(self._notes) < self._capacity:
            self._notes.append(note)
        else:
            self.lost += 1

    # -- the thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.flush()

    def _as_span(
        self, track: Track, name: str, begin_ns: int, end_ns: int, cat: str, args: Mapping[str, Any]
    ) -> list[Event]:
        more = {"cat": cat, "dur": (end_ns - begin_ns) / 1000, "args": args}
        return [*self._new_track(track), self._event(track, name, "X", begin_ns, **more)]

    def _as_instant(self, track: Track, name: str, at_ns: int) -> list[Event]:
        return [*self._new_track(track), self._event(track, name, "i", at_ns, s="t")]

    def _as_phases(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> list[Event]:
        """Chrome's "async" events: whatever has the same key is drawn together, beside other keys."""
        common: dict[str, Any] = {"cat": cat, "id2": {"local": key}}
        events: list[Event] = []
        within: list[tuple[str, int]] = []

        def end_what_does_not_hold(until_ns: float) -> None:
            while within and within[-1][1] < until_ns:
                name, end_ns = within.pop()
                events.append(self._event(None, name, "e", end_ns, **common))

        for name, begin_ns, end_ns in phases:
            end_what_does_not_hold(end_ns)
            within.append((name, end_ns))
            more = {} if events else {"args": args}
            events.append(self._event(None, name, "b", begin_ns, **common, **more))
        end_what_does_not_hold(math.inf)
        return events

    def _event(self, track: Track | None, name: str, kind: str, at_ns: int, **more: Any) -> Event:
        tid = 0 if track is None else self._threads_of[track]
        return {
            "name": name,
            "ph": kind,
            "ts": self._clock.to_us(at_ns),
            "pid": self._rank,
            "tid": tid,
        } | more

    def _new_track(self, track: Track) -> list[Event]:
        """Name a track when it is seen first."""
        if track in self._threads_of:
            return []
        tid = self._threads_of[track] = len(self._threads_of) + 1
        return [self._meta("thread_name", {"name": track.name, "ranks": track.ranks}, tid)]
