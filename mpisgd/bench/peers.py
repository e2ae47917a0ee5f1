"""Other frameworks as seen from a rank: one child process each, and variants that live there."""

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import mpisgd
from mpisgd.bench.measure import Unavailable
from mpisgd.bench.network import Interface, Meeting, interfaces, meeting_place
from mpisgd.bench.payload import WrongResult
from mpisgd.bench.processes import Process, start_beside, start_in_job

T = TypeVar("T")

__all__ = ["FRAMEWORKS", "Child", "Peers", "RemoteVariant", "open_peers", "places"]

FRAMEWORKS = ("gloo", "horovod")
# They keep a thread busy even while nobody asks them for anything.
RESTLESS = ("horovod",)

# At their best as the ranks of a job.
IN_JOB = ("horovod",)

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 90.0
# Children wait this much less for each other, so that they say themselves what did not come.
MARGIN_S = 20.0


class Child:
    """The process beside this rank that runs one framework.

    Raises from all methods but `close`: Unavailable, once it has failed or did not answer in time; after
    that it is gone.

    Args:
        framework: one of FRAMEWORKS.
        process: in which it runs.

    Attributes:
        broken: why it is gone, "" while it is there.
    """

    def __init__(self, framework: str, process: Process) -> None:
        self.framework = framework
        self.broken = ""
        self._process = process

    def ready(self) -> None:
        """Wait until it has loaded its framework."""
        self._receive(START_LIMIT_S)

    def ask(self, method: str, *args: Any) -> Any:
        """Let it do something and return its answer."""
        if self.broken:
            raise Unavailable(self.broken)
        try:
            self._process.connection.send((method, args))
        except OSError:
            self._fail(f"its process is gone: {self._process.last_words()}")
        return self._receive(ANSWER_LIMIT_S)

    def pause(self) -> None:
        """Stop a restless one, which no other rank's child must be waiting for."""
        if self.framework in RESTLESS and not self.broken:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        if self.framework in RESTLESS and not self.broken:
            self._process.send_signal(signal.SIGCONT)

    def _receive(self, limit_s: float) -> Any:
        try:
            if not self._process.connection.poll(limit_s):
                self._fail(f"no answer within {limit_s:.0f} s")
            kind, value = self._process.connection.recv()
        except (EOFError, OSError):
            self._fail(f"its process ended: {self._process.last_words()}")
        if kind == "wrong":
            raise WrongResult(value)
        if kind == "failed":
            raise Unavailable(value)
        return value

    def _fail(self, reason: str) -> None:
        self.broken = reason
        self.close()
        raise Unavailable(reason)

    def close(self) -> None:
        """Hang up, and see that it ends."""
        self._process.end()


class RemoteVariant:
    """A variant that lives in the children of all ranks.

    Args:
        name: in tables, and in the child.
        child: this rank's.
        task: what to measure.
    """

    ours = False

    def __init__(self, name: str, child: Child, task: Any) -> None:
        self.name = name
        self._child = child
        self._task = task
        self._made = False

    def check(self) -> None:
        """See `Variant`."""
        with _awake(self._child):
            self._child.ask("make", self.name, self._task)
            self._made = True
            self._child.ask("check", self.name)

    def time(self, calls: int) -> float:
        """See `Variant`."""
        with _awake(self._child):
            seconds: float = self._child.ask("time", self.name, calls)
            return seconds

    def release(self) -> None:
        """See `Variant`."""
        if self._made:
            with contextlib.suppress(Unavailable), _awake(self._child):
                self._child.ask("release", self.name)


@contextlib.contextmanager
def _awake(child: Child) -> Iterator[None]:
    """Let a restless child run for a moment: until those of all ranks are done. Collective."""
    child.resume()
    try:
        yield
    finally:
        if child.framework in RESTLESS:
            mpisgd.barrier()
            child.pause()


class Peers:
    """The frameworks that could be had.

    Attributes:
        children: by framework.
        versions: by framework.
        left_out: the others, and why.
    """

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}
        self.versions: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def open(self, framework: str) -> None:
        """Start one framework on all ranks, or note why it cannot be had. Collective."""
        for start in _ways(framework):
            reason = self._try(framework, start)
            if not reason:
                self.left_out.pop(framework, None)
                return
            self.left_out[framework] = reason

    def _try(self, framework: str, start: Callable[[str], Process]) -> str:
        """Start a framework in one way and keep it, or return why it cannot be had so. Collective."""
        place = places()
        reason, process = _first_reason(lambda: start(framework))
        if process is None:
            return reason
        child = Child(framework, process)
        reason, version = _first_reason(lambda: _load(child))
        if not reason and place is None:
            reason = "the hosts of the job have no network in common that can be seen"
        if not reason and place is not None:
            reason, _ = _first_reason(lambda: _meet(child, place))
        if reason:
            child.close()
            return reason
        self.children[framework], self.versions[framework] = child, version or ""
        child.pause()
        return ""

    def drop_broken(self) -> None:
        """Give up the frameworks whose child is gone on some rank: each try would cost its time limit.

        Collective.
        """
        for framework, child in list(self.children.items()):
            reasons: list[str] = [""] * mpisgd.size()
            mpisgd.all_gather_object(reasons, child.broken)
            if reason := next((text for text in reasons if text), ""):
                self.left_out[framework] = reason
                self.children.pop(framework).close()

    def close(self) -> None:
        """End the children."""
        for child in self.children.values():
            child.close()


@contextlib.contextmanager
def open_peers(wanted: Sequence[str]) -> Iterator[Peers]:
    """Start the frameworks `wanted`, and end them afterwards. Collective."""
    peers = Peers()
    try:
        for framework in wanted:
            peers.open(framework)
        yield peers
    finally:
        peers.close()


def _ways(framework: str) -> list[Callable[[str], Process]]:
    """Return the ways of starting a framework, the best first. Collective.

    The second job that Horovod needs for MPI is asked for on one host only: how to start one on several
    is known to the user's mpirun alone.
    """
    if framework in IN_JOB and mpisgd.num_nodes() == 1 and importlib.util.find_spec(framework):
        return [start_in_job, start_beside]
    return [start_beside]


def _load(child: Child) -> str:
    child.ready()
    version: str = child.ask("version")
    return version


def _meet(child: Child, place: Sequence[Interface]) -> str:
    """Bring the children of all ranks together, on a port that rank 0's child found free."""
    rank = mpisgd.rank()
    port, reason = 0, ""
    if rank == 0:
        try:
            port = child.ask("host", place[0].address)
        except Unavailable as exc:
            reason = str(exc)
    port, reason = mpisgd.broadcast_object((port, reason))
    if reason:
        raise Unavailable(reason)
    meeting = Meeting(
        rank=rank,
        size=mpisgd.size(),
        local_rank=mpisgd.local_rank(),
        local_size=mpisgd.local_size(),
        node_rank=mpisgd.node_rank(),
        num_nodes=mpisgd.num_nodes(),
        address=place[0].address,
        port=port,
        interface=place[rank].name,
        timeout_s=ANSWER_LIMIT_S - MARGIN_S,
    )
    child.ask("join", meeting)
    return ""


def places() -> list[Interface] | None:
    """Return each rank's interface on a network that all are on, None if there is none. Collective."""
    everyones: list[list[Interface]] = [[]] * mpisgd.size()
    mpisgd.all_gather_object(everyones, interfaces())
    return meeting_place(everyones, mpisgd.num_nodes())


def _first_reason(action: Callable[[], T]) -> tuple[str, T | None]:
    """Return why `action` failed on some rank ("" where it did on none), and its value here."""
    reason, value = "", None
    try:
        value = action()
    except Unavailable as exc:
        reason = str(exc)
    reasons: list[str] = [""] * mpisgd.size()
    mpisgd.all_gather_object(reasons, reason)
    return next((text for text in reasons if text), ""), value
