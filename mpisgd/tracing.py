"""The sink that recorders plug into, so that what communicates does not depend on timelines and metrics.

Where `sink` is None, an operation pays for one comparison. Times are nanoseconds of `time.monotonic_ns`.
"""

import contextlib
import functools
import importlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mpisgd.config import Endpoint

__all__ = [
    "Operation",
    "OperationSpan",
    "Sink",
    "Track",
    "abandon",
    "add_sink",
    "blocked",
    "flush",
    "holding",
    "part",
    "purpose",
    "remove_sink",
    "start_metrics",
    "start_recorder",
    "under_way",
]

# Plug-ins, found by their names: they are made of what is in here, and lie above it.
RECORDER = "mpisgd.timeline.session"
METRICS = "mpisgd.metrics.session"
OUR_THREADS = "mpisgd"
DIRECT = ("collective", "")  # what the program itself has called


class Track(NamedTuple):
    """What happens one after the other, and is drawn in one line.

    Attributes:
        name: of a group's queue, or a thread.
        ranks: global ranks of the group; they and the name make a group's queue on one rank find the others'.
    """

    name: str
    ranks: tuple[int, ...] = ()


class Operation(Protocol):
    """What is recorded of an operation; see `mpisgd.core.consistency.Operation`."""

    @property
    def kind(self) -> str:
        """The public name, `all_reduce`."""

    @property
    def dtype(self) -> str:
        """As in `float32`, or ""."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def extra(self) -> str:
        """May name the algorithm."""


class Sink(Protocol):
    """What records the events. Any thread may call it, and it never waits."""

    def span(
        self, track: Track, name: str, begin_ns: int, end_ns: int, cat: str, args: Mapping[str, Any]
    ) -> None:
        """Note what took from `begin_ns` to `end_ns`, and lies within or beside all else of its track."""

    def overlapping(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> None:
        """Note what others of its kind may overlap: (name, begin, end), in each other or in turn."""

    def instant(self, track: Track, name: str, at_ns: int) -> None:
        """Note a moment."""

    def sent(self, dst: int, nbytes: int) -> None:
        """Count bytes that MPI is given to send to a rank of the job."""

    def flush(self) -> None:
        """Write down what was noted so far."""


class _Both(NamedTuple):
    """Two sinks that are given the same, such as those of a timeline and of metrics."""

    first: Sink
    second: Sink

    def span(
        self, track: Track, name: str, begin_ns: int, end_ns: int, cat: str, args: Mapping[str, Any]
    ) -> None:
        """See `Sink`."""
        self.first.span(track, name, begin_ns, end_ns, cat, args)
        self.second.span(track, name, begin_ns, end_ns, cat, args)

    def overlapping(
        self, cat: str, key: str, phases: Sequence[tuple[str, int, int]], args: Mapping[str, Any]
    ) -> None:
        """See `Sink`."""
        self.first.overlapping(cat, key, phases, args)
        self.second.overlapping(cat, key, phases, args)

    def instant(self, track: Track, name: str, at_ns: int) -> None:
        """See `Sink`."""
        self.first.instant(track, name, at_ns)
        self.second.instant(track, name, at_ns)

    def sent(self, dst: int, nbytes: int) -> None:
        """See `Sink`."""
        self.first.sent(dst, nbytes)
        self.second.sent(dst, nbytes)

    def flush(self) -> None:
        """See `Sink`."""
        self.first.flush()
        self.second.flush()


sink: Sink | None = None
# When the operations and waits began that are recorded when they end.
under_way: dict[object, int] = {}
# Where metrics are served, now or in the world that follows a loss; None: nothing is measured.
metrics: Endpoint | None = None
# Stop recording, without communicating: a rank was lost.
at_loss: list[Callable[[], None]] = []
_sinks: list[Sink] = []
_purpose = threading.local()


def add_sink(new: Sink) -> None:
    """Record into one more from now on."""
    _set_sinks([*_sinks, new])


def remove_sink(old: Sink) -> None:
    """Record no more into one."""
    _set_sinks([each for each in _sinks if each is not old])


def _set_sinks(sinks: list[Sink]) -> None:
    global _sinks, sink
    _sinks, sink = sinks, functools.reduce(_Both, sinks) if sinks else None


def start_recorder(path: str, world: Any) -> None:
    """Record into a file from now on; see `open_timeline` of the recorder. Collective over the job."""
    importlib.import_module(RECORDER).open_timeline(path, world)


def start_metrics(job: Any) -> str | None:
    """Measure and serve what the ranks of a job have agreed to; return what went wrong. Not collective."""
    problem: str | None = importlib.import_module(METRICS).begin(job)
    return problem


def flush() -> None:
    """Write down what was noted so far: the process is about to end."""
    if sink is not None:
        sink.flush()


def abandon() -> None:
    """Stop recording without communicating: a rank was lost."""
    for stop in list(at_loss):
        stop()
    under_way.clear()


def purpose(cat: str, name: str = "") -> contextlib.AbstractContextManager[None]:
    """Record this thread's operations as what they are for: another category, and another name if given."""
    return contextlib.nullcontext() if sink is None else _noted("given", (cat, name), DIRECT)


def holding(contents: Callable[[], Mapping[str, Any]]) -> contextlib.AbstractContextManager[None]:
    """Record this thread's operations with further arguments: what is in the tensors that they move."""
    return contextlib.nullcontext() if sink is None else _noted("contents", contents(), {})


@contextlib.contextmanager
def _noted(attribute: str, value: Any, afterwards: Any) -> Iterator[None]:
    """Let this thread's operations find a value in `_purpose` meanwhile."""
    setattr(_purpose, attribute, value)
    try:
        yield
    finally:
        setattr(_purpose, attribute, afterwards)


def part(
    track: Track, name: str, nbytes: int, contents: Callable[[], Mapping[str, Any]]
) -> contextlib.AbstractContextManager[None]:
    """Record a part of the running operation, with its contents."""
    if sink is None:
        return contextlib.nullcontext()
    return _span(sink, track, name, "phase", {"bytes": nbytes, **contents()})


def blocked(name: str) -> contextlib.AbstractContextManager[None]:
    """Note that the program waits for `name` meanwhile, and does nothing else."""
    if sink is None or (thread := threading.current_thread().name).startswith(OUR_THREADS):
        return contextlib.nullcontext()
    return _span(sink, Track(thread), f"wait for {name}", "blocked", {})


@contextlib.contextmanager
def _span(sink: Sink, track: Track, name: str, cat: str, args: Mapping[str, Any]) -> Iterator[None]:
    key = object()
    begin_ns = under_way[key] = time.monotonic_ns()
    try:
        yield
    finally:
        sink.span(track, name, begin_ns, time.monotonic_ns(), cat, args)
        under_way.pop(key, None)


class OperationSpan:
    """One operation of a queue while it is being recorded; made when it is submitted.

    Args:
        sink: what records it.
        track: the queue's.
        operation: what it is.
        tensors: what it moves.
        transport: what moves it, where the operation does not name an algorithm.
        async_op: whether its caller went on.
    """

    def __init__(
        self, sink: Sink, track: Track, operation: Operation, tensors: Any, transport: str, async_op: bool
    ) -> None:
        self._sink = sink
        self._track = track
        self._operation = operation
        given: tuple[str, str] = getattr(_purpose, "given", DIRECT)
        self._cat, self._name = given
        self._thread = threading.get_ident()
        self._submitted_ns = self._begun_ns = self._arrived_ns = self._all_arrived_ns = time.monotonic_ns()
        algorithm = operation.extra.removeprefix("algorithm=")
        self._args: dict[str, Any] = {
            "bytes": _nbytes(tensors, operation),
            "transport": transport if algorithm == operation.extra else algorithm,
            "async": async_op,
            **getattr(_purpose, "contents", {}),
        }

    def begins(self) -> None:
        """Its turn has come."""
        self._begun_ns = under_way[self] = time.monotonic_ns()

    def arrives(self, number: int) -> None:
        """From now on the others can see that this rank is at its queue's operation of that number."""
        self._arrived_ns = time.monotonic_ns()
        self._args["number"] = number

    def all_arrived(self) -> None:
        """All ranks are here."""
        self._all_arrived_ns = time.monotonic_ns()

    def ends(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        end_ns, operation = time.monotonic_ns(), self._operation
        name = self._name or operation.kind
        arrived_ns = max(self._arrived_ns, self._begun_ns)
        all_arrived_ns = max(self._all_arrived_ns, arrived_ns) if error is None else end_ns
        args = self._args | {
            "what": str(operation),
            "arrived_us": (arrived_ns - self._begun_ns) / 1000,
            "wait_us": (all_arrived_ns - arrived_ns) / 1000,
            "blocking": not threading.current_thread().name.startswith(OUR_THREADS),
        }
        if threading.get_ident() != self._thread:
            args["queue_us"] = (self._begun_ns - self._submitted_ns) / 1000
            phases = [(f"queue: {name}", self._submitted_ns, self._begun_ns)]
            self._sink.overlapping("queue", f"{self._track.name} {self._submitted_ns}", phases, {})
        if error is not None:
            args["error"] = str(error)
        self._sink.span(self._track, name, self._begun_ns, end_ns, self._cat, args)
        self._sink.span(self._track, "wait for the others", arrived_ns, all_arrived_ns, "phase", {})
        self._sink.span(self._track, "move", all_arrived_ns, end_ns, "phase", {})
        under_way.pop(self, None)


def _nbytes(tensors: Any, operation: Operation) -> int:
    """Return the bytes of an operation's tensors on this rank, or of what its description tells."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if tensors:
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    dtype = getattr(torch, operation.dtype, None)
    return math.prod(operation.shape) * dtype.itemsize if isinstance(dtype, torch.dtype) else 0
