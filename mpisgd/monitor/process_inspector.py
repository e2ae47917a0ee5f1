"""A process that does not answer, described by another one of its host.

The kernel says whether it is stopped, gone or running. One that runs but does not answer is in C code that
keeps Python's interpreter lock, or gets no time: a signal lets Python's own fault handler write the stacks
of its threads into a file without a name, which takes no lock, and which the others read.
"""

import contextlib
import faulthandler
import functools
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from mpisgd.monitor.rank_state import GONE, STOPPED, UNRESPONSIVE, RankState

__all__ = [
    "ProcessIdentity",
    "identify_this_process",
    "inspect",
    "is_gone",
    "is_stopped_or_gone",
    "start_ticks",
]

# One that nobody uses: the first few belong to the C library and to tools, programs take the plain ones.
DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 11 if hasattr(signal, "SIGRTMIN") else 0
DUMP_S = 0.5
SETTLED_S = 0.03
SAMPLE_S = 0.2
MONITOR_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watchdog.py")
DUMPED = "all threads, the innermost call first"
STATES = {
    psutil.STATUS_RUNNING: "runs",
    psutil.STATUS_SLEEPING: "sleeps",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
    psutil.STATUS_IDLE: "idles",
}
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
STOPPED_BY = {
    psutil.STATUS_STOPPED: "by a signal (kill -CONT lets it go on)",
    psutil.STATUS_TRACING_STOP: "by a debugger",
}


class ProcessIdentity(NamedTuple):
    """Where others of the host find a process.

    Attributes:
        pid: of the process.
        began: when it began, in the kernel's ticks: another process of the same number began later.
        dumps: its file descriptor for stacks, -1 if it has none.
    """

    pid: int
    began: int
    dumps: int


def identify_this_process() -> ProcessIdentity:
    """Prepare this process for being inspected by others; they find it by what is returned."""
    return ProcessIdentity(os.getpid(), start_ticks(os.getpid()), _dumps())


@functools.cache
def _dumps() -> int:
    """Return the file that the fault handler dumps into on DUMP_SIGNAL, -1 where that cannot be had."""
    if not DUMP_SIGNAL or signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
        return -1
    try:
        fd = os.memfd_create("mpisgd-stacks")
        os.fchmod(fd, 0o600)
        faulthandler.register(DUMP_SIGNAL, fd, all_threads=True)
    except (OSError, AttributeError, ValueError):
        return -1
    return fd


def start_ticks(pid: int) -> int:
    """Return when a process began, in the kernel's ticks since it booted; 0 where there is none.

    psutil adds the time of the boot, which is another one whenever the clock is set: not to be compared with
    what another process has read.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def is_stopped_or_gone(process: ProcessIdentity) -> bool:
    """Return whether a process of this host will certainly not answer."""
    return _status(process) in (*ENDED, *STOPPED_BY)


def is_gone(process: ProcessIdentity) -> bool:
    """Return whether a process of this host is no more."""
    return _status(process) in ENDED


def _status(process: ProcessIdentity) -> str:
    """Return the status of a process, as psutil calls it; STATUS_DEAD where there is none."""
    if process.began and start_ticks(process.pid) != process.began:
        return psutil.STATUS_DEAD
    try:
        return psutil.Process(process.pid).status()
    except psutil.Error:
        return psutil.STATUS_DEAD


def inspect(rank: int, host: str, process: ProcessIdentity, watched_s: float, *, deep: bool) -> RankState:
    """Return the state of a rank of this host that does not answer.

    Args:
        rank: its global rank.
        host: name of this host.
        process: where it is.
        watched_s: how long it was waited for.
        deep: whether a process that runs is sent the signal that dumps its stacks. A system call that it
            sleeps in may end early of that.
    """
    status = _status(process)
    if status in ENDED:
        return RankState(rank, host, process.pid, GONE, note="its process is gone")
    if status in STOPPED_BY:
        note = f"its process is stopped {STOPPED_BY[status]}"
        return RankState(rank, host, process.pid, STOPPED, note=note)
    share, text = 0.0, ""
    with contextlib.suppress(psutil.Error):
        running = psutil.Process(process.pid)
        running.cpu_percent()  # from now on
        text = _dumped(process) if deep else ""
        time.sleep(SAMPLE_S)
        share = running.cpu_percent() / 100
    state = STATES.get(status, f"is in state {status}")
    note = (
        f"its process {state} ({share:.0%} of a core) but has not let Python's threads run for "
        f"{watched_s:.1f} s: in C code that keeps Python's interpreter lock, or short of time"
    )
    return RankState(rank, host, process.pid, UNRESPONSIVE, stacks={DUMPED: text} if text else {}, note=note)


_one_at_a_time = threading.Lock()


def _dumped(process: ProcessIdentity) -> str:
    """Let a process dump its stacks, and return them; "" where it cannot."""
    try:
        with _one_at_a_time, open(f"/proc/{process.pid}/fd/{process.dumps}", "rb") as file:
            start = file.seek(0, os.SEEK_END)
            os.kill(process.pid, DUMP_SIGNAL)
            _wait_until_settled(file.fileno(), start)
            return _without_repetition(file.read().decode(errors="replace"))
    except OSError:  # also where it has no such file
        return ""


def _without_repetition(dump: str) -> str:
    """Return a thread's stack once, if several ranks have asked for it; and not the stall monitor's."""
    blocks = {}
    for block in re.split(r"\n(?=Thread|Current thread)", dump):
        head, _, frames = block.strip().partition("\n")
        if MONITOR_FILE not in frames:
            blocks[head.removeprefix("Current ").lower()] = frames
    return "\n".join(f"{head}\n{frames}" for head, frames in blocks.items())


def _wait_until_settled(file: int, start: int) -> None:
    """Return when a file has grown beyond `start` and grows no more, or after DUMP_S."""
    deadline_s, size = time.monotonic() + DUMP_S, start
    while time.monotonic() < deadline_s:
        time.sleep(SETTLED_S)
        before, size = size, os.fstat(file).st_size
        if size == before > start:
            return
