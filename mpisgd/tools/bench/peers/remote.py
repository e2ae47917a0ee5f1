"""`Peers`: other frameworks as seen from a rank, and the variants that run in their processes."""

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its type stubs forget it

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import topology
from mpisgd.tools.bench.measure import Unavailable, Variant, first_reason
from mpisgd.tools.bench.peers.framework import Rendezvous
from mpisgd.tools.bench.peers.process import Peer, start_beside, start_in_job, start_once
from mpisgd.tools.bench.report.rows import ONE_PROCESS
from mpisgd.transport.tcp_store.rendezvous import find_listener

__all__ = ["Peers", "open_peers"]

# At their best as the ranks of a job.
IN_JOB = ("horovod",)

Start = Callable[[str, str], Peer]  # given a framework and a folder


class RemoteVariant:
    """A variant that lives in the processes of another framework.

    Args:
        name: in tables, and in the process.
        peer: this rank's process.
        task: what to measure.
    """

    ours = False

    def __init__(self, name: str, peer: Peer, task: Any) -> None:
        self.name = name
        self.threads: Sequence[int] = ()
        self.num_threads = 0
        self._peer = peer
        self._task = task

    def check(self) -> None:
        """See `Variant`."""
        self._peer.ask("check", self.name, self._task)

    def time(self, calls: int) -> float:
        """See `Variant`."""
        return float(self._peer.ask("time", self.name, calls, self.num_threads))

    def release(self) -> None:
        """See `Variant`."""
        with contextlib.suppress(Unavailable):
            self._peer.ask("release", self.name)


class Peers:
    """The frameworks that could be had.

    Attributes:
        running: this rank's process, by framework.
        left_out: the others, and why.
    """

    def __init__(self) -> None:
        self.running: dict[str, Peer] = {}
        self.left_out: dict[str, str] = {}
        self._store: TCPStore | None = None  # rank 0's; the processes need it to the end

    def open(self, wanted: Sequence[str]) -> None:
        """Start frameworks on all ranks, each in its best way, or note why they cannot be had. Collective."""
        try:
            (address, port), listener = find_listener(world().queue.communicator)
        except mpisgd.Unreachable as exc:
            self.left_out.update(dict.fromkeys(wanted, str(exc)))
            return
        if listener is not None:
            fd = listener.detach()
            self._store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        for framework in wanted:
            for start in _ways(framework):
                if framework not in self.running:
                    self._open(framework, Rendezvous(topology(), address, port), start)

    def _open(self, framework: str, rendezvous: Rendezvous, start: Start) -> None:
        """Start a framework in one way, or note why it cannot be had so. Collective."""
        started: list[Peer] = []
        with tempfile.TemporaryDirectory() as folder:
            reason = _first_failure(lambda: started.append(start(framework, folder)))
        reason = reason or _first_failure(lambda: started[0].load(rendezvous))
        if not reason:
            self.running[framework] = started[0]
            self.left_out.pop(framework, None)
            return
        self.left_out[framework] = reason
        for peer in started:
            peer.close()

    def variants(self, framework: str, tasks: Mapping[str, Any]) -> list[Variant]:
        """Return variants of a framework, by name; none where it is not running."""
        peer = self.running.get(framework)
        return [RemoteVariant(name, peer, task) for name, task in tasks.items()] if peer else []

    def drop_broken(self) -> None:
        """Give up the frameworks whose process is gone on some rank: each try would cost its time limit.

        Collective.
        """
        for framework, peer in list(self.running.items()):
            if reason := first_reason(peer.broken):
                self.left_out[framework] = reason
                self.running.pop(framework).close()


@contextlib.contextmanager
def open_peers(wanted: Sequence[str]) -> Iterator[Peers]:
    """Start the frameworks `wanted`, and end them afterwards. Collective."""
    peers = Peers()
    try:
        if wanted:
            peers.open(wanted)
        yield peers
    finally:
        for peer in peers.running.values():
            peer.close()


def _ways(framework: str) -> list[Start]:
    """Return the ways of starting a framework, the best first. Collective.

    The second job that Horovod needs for MPI is asked for on one host only: how to start one on several
    is known to the user's mpirun alone.
    """
    if framework in ONE_PROCESS:
        return [start_once]
    if framework in IN_JOB and mpisgd.num_nodes() == 1 and importlib.util.find_spec(framework):
        return [start_in_job, start_beside]
    return [start_beside]


def _first_failure(action: Callable[[], object]) -> str:
    """Return why `action` failed on the first rank where it did, "" where it did on none. Collective."""
    reason = ""
    try:
        action()
    except Unavailable as exc:
        reason = str(exc)
    return first_reason(reason)
