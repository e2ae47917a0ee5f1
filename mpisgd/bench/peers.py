"""Other frameworks as seen from a rank: one child process each, and variants that live there."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

import torch

import mpisgd
from mpisgd.bench.measure import Unavailable
from mpisgd.bench.network import Interface, Meeting, interfaces, meeting_place
from mpisgd.bench.payload import WrongResult

__all__ = ["FRAMEWORKS", "Child", "Peers", "RemoteVariant", "open_peers"]

FRAMEWORKS = ("gloo", "horovod")
# They keep a thread busy even while nobody asks them for anything.
RESTLESS = ("horovod",)

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 90.0
# Children wait this much less for each other, so that they say themselves what did not come.
MARGIN_S = 20.0
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")


class Child:
    """The process beside this rank that runs one framework.

    Raises from all methods but `close`: Unavailable, once it has failed or did not answer in time; after
    that it is gone.

    Attributes:
        broken: why it is gone, "" while it is there.
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.broken = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the child
        self._connection, theirs = Pipe()
        command = [
            *(sys.executable, "-m", "mpisgd.bench.child"),
            *(str(theirs.fileno()), framework, str(torch.get_num_threads())),
        ]
        self._process = subprocess.Popen(
            command,
            env={k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        theirs.close()

    def ready(self) -> None:
        """Wait until it has loaded its framework."""
        self._receive(START_LIMIT_S)

    def ask(self, method: str, *args: Any) -> Any:
        """Let it do something and return its answer."""
        if self.broken:
            raise Unavailable(self.broken)
        try:
            self._connection.send((method, args))
        except OSError:
            self._fail(f"its process is gone: {self._last_words()}")
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
            if not self._connection.poll(limit_s):
                self._fail(f"no answer within {limit_s:.0f} s")
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            self._fail(f"its process ended: {self._last_words()}")
        if kind == "wrong":
            raise WrongResult(value)
        if kind == "failed":
            raise Unavailable(value)
        return value

    def _fail(self, reason: str) -> None:
        self.broken = reason
        self.close()
        raise Unavailable(reason)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"exit code {self._process.returncode}, {said}"

    def close(self) -> None:
        """Hang up, and see that it ends."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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
        child = Child(framework)
        place = _places()
        reason, version = _first_reason(lambda: _load(child))
        if not reason and place is None:
            reason = "the hosts of the job have no network in common that can be seen"
        if not reason and place is not None:
            reason, _ = _first_reason(lambda: _meet(child, place))
        if reason:
            self.left_out[framework] = reason
            child.close()
        else:
            self.children[framework] = child
            self.versions[framework] = version
            child.pause()

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


def _places() -> list[Interface] | None:
    everyones: list[list[Interface]] = [[]] * mpisgd.size()
    mpisgd.all_gather_object(everyones, interfaces())
    return meeting_place(everyones, mpisgd.num_nodes())


def _first_reason(action: Any) -> tuple[str, str]:
    """Return why `action` failed on some rank ("" where it did on none), and its value here."""
    reason, value = "", ""
    try:
        value = action()
    except Unavailable as exc:
        reason = str(exc)
    reasons: list[str] = [""] * mpisgd.size()
    mpisgd.all_gather_object(reasons, reason)
    return next((text for text in reasons if text), ""), value
