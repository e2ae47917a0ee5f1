"""`Meter`: the sink that adds up what a rank did, in words that other processes of its host see.

It is given what a timeline records (`mpisgd.tracing`), and divides it as a report does
(`mpisgd.timeline.accounts`). The program's threads only append to a list; a thread adds up once per second,
up to the beginning of what is under way, of which nothing is known before it ends: a rank that hangs keeps
its sums, and `mpisgd_waiting_seconds` says for how long it waits.
"""

import collections
import threading
import time
from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np

from mpisgd import tracing
from mpisgd.monitor.mailbox_pages import Meters
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.timeline.accounts import MEDIA, MOVING, Activity
from mpisgd.tracing import Track

__all__ = ["Meter"]

PERIOD_S = 1.0
CAPACITY = 100_000  # spans until they are added up: the oldest ones are dropped
US = 1000.0  # nanoseconds
COUNTED = {*MOVING, "negotiation", "blocked", "step"}
FIELDS = {
    "shared memory": "shared_bytes",
    "cross-memory attach": "attached_bytes",
    "MPI's collectives": "collective_bytes",
}

_Span = tuple[str, str, int, int, Mapping[str, Any]]


class Meter:
    """The sums of one rank.

    Args:
        words: where they are written, as `Meters` has them; they begin at 0.
        here: the ranks of this host.
    """

    def __init__(self, words: MutableSequence[int] | memoryview, here: Collection[int]) -> None:
        self._words = words
        self._here = frozenset(here)
        self._spans: collections.deque[_Span] = collections.deque(maxlen=CAPACITY)
        self._activity = Activity()
        self._sums: dict[str, float] = dict.fromkeys(Meters._fields, 0)
        self._sent = [0, 0]  # to this host, to others
        self._counting = threading.Lock()
        self._adding = threading.Lock()
        self._closed = threading.Event()
        self._origin_ns = time.monotonic_ns()
        self._until_ns = self._origin_ns
        self._thread = ServiceThread("mpisgd metrics", self._serve)
        self._write()

    def start(self) -> None:
        """Add up from now on."""
        self._thread.start()

    def close(self) -> None:
        """Add up what is left, and end."""
        self._closed.set()
        self._thread.join_from_others()
        self.add_up()

    # -- what any thread calls: see `mpisgd.tracing.Sink` ------------------------------------------------

    def span(
        self, track: Track, name: str, begin_ns: int, end_ns: int, cat: str, args: Mapping[str, Any]
    ) -> None:
        """Keep what is counted."""
        if cat in COUNTED:
            self._spans.append((cat, name, begin_ns, end_ns, args))

    def overlapping(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> None:
        """Keep the waits."""
        self._spans.extend((f"overlapping {cat}", name, begin, end, args) for name, begin, end in phases)

    def instant(self, track: Track, name: str, at_ns: int) -> None:
        """Nothing that is counted."""

    def sent(self, dst: int, nbytes: int) -> None:
        """Count them."""
        with self._counting:
            self._sent[dst not in self._here] += nbytes

    def flush(self) -> None:
        """Nothing is written to a file."""

    # -- adding up ---------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        self.add_up()
        return not self._closed.wait(PERIOD_S)

    def add_up(self) -> None:
        """Add what has ended to the sums, up to the beginning of what has not; any thread may."""
        with self._adding:
            # In this order: what ends meanwhile is in the list, and what begins meanwhile begins later.
            until_ns = min([time.monotonic_ns(), *tracing.under_way.copy().values()])
            while self._spans:
                self._add(*self._spans.popleft())
            if until_ns > self._until_ns:
                begin, end = float(self._until_ns - self._origin_ns), float(until_ns - self._origin_ns)
                parts = self._activity.divide(np.array([begin]), np.array([end]))
                for name, part in zip(parts._fields, parts, strict=True):
                    self._sums[f"{name}_ns"] += float(part[0])
                self._activity.forget(end)
                self._until_ns = until_ns
            self._write()

    def _add(self, cat: str, name: str, begin_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        begin, end = float(begin_ns - self._origin_ns), float(end_ns - self._origin_ns)
        if cat == "step":
            self._sums["num_steps"] += 1
        elif cat.startswith("overlapping "):
            self._activity.add_overlapping(cat.removeprefix("overlapping "), name, begin, end)
        else:
            self._activity.add_span(cat, begin, end, args, us=US)
            if cat in MOVING and (medium := MEDIA.get(args["transport"])) is not None:
                self._sums[FIELDS[medium]] += args["bytes"]

    def _write(self) -> None:
        with self._counting:
            self._sums["to_host_bytes"], self._sums["to_others_bytes"] = self._sent
        for i, name in enumerate(Meters._fields):
            self._words[i] = int(self._sums[name])
