"""A process that does not answer, described by another one of its host.

The kernel says whether it is stopped, gone or running. One that runs but does not answer is in C code that
keeps Python's interpreter lock, or gets no time: a signal lets Python's own fault handler write the stacks
of its threads into a file without a name, which takes no lock, and which the others read.
"""

import contextlib
import faulthandler
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
MONITOR_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stall_monitor.py")
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


_dump_file = -1


def _dumps() -> int:
    """Return the file that the fault handler dumps into on DUMP_SIGNAL, -1 where that cannot be had."""
    global _dump_file
    if _dump_file < 0 and DUMP_SIGNAL and signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL:
        with contextlib.suppress(OSError, AttributeError, ValueError):
            fd = os.memfd_create("mpisgd-stacks")
            os.fchmod(fd, 0o600)
            faulthandler.register(DUMP_SIGNAL, fd, all_threads=True)
            _dump_file = fd
    return _dump_file


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
    """Return whether a process of this host will not answer for sure."""
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
        return RankState(
            rank, host, process.pid, STOPPED, note=f"its process is stopped {STOPPED_BY[status]}"
        )
    before_s, began_s = _cpu_s(process), time.monotonic()
    text = _dumped(process) if deep else ""
    time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - began_s)))
    share = max(0.0, _cpu_s(process) - before_s) / (time.monotonic() - began_s)
    state = STATES.get(status, f"is in state {status}")
    note = (
        f"its process {state} ({share:.0%} of a core) but has not let Python's threads run for "
        f"{watched_s:.1f} s: in C code that keeps Python's interpreter lock, or short of time"
    )
    return RankState(rank, host, process.pid, UNRESPONSIVE, stacks={DUMPED: text} if text else {}, note=note)


def _cpu_s(process: ProcessIdentity) -> float:
    """Return the seconds on a core that a process has had; 0 where there is none."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


_one_at_a_time = threading.Lock()


def _dumped(process: ProcessIdentity) -> str:
    """Let a process dump its stacks, and return them; "" where it cannot."""
    if process.dumps < 0:
        return ""
    try:
        file = os.open(f"/proc/{process.pid}/fd/{process.dumps}", os.O_RDONLY)
    except OSError:
        return ""
    try:
        with _one_at_a_time:
            start = os.fstat(file).st_size
            os.kill(process.pid, DUMP_SIGNAL)
            dump = os.pread(file, _settled_size(file, start) - start, start).decode(errors="replace")
            return _without_repetition(dump)
    except OSError:
        return ""
    finally:
        os.close(file)


def _without_repetition(dump: str) -> str:
    """Return a thread's stack once, if several ranks have asked for it; and not the stall monitor's."""
    blocks = {}
    for block in re.split(r"\n(?=Thread|Current thread)", dump):
        head, _, frames = block.strip().partition("\n")
        if MONITOR_FILE not in frames:
            blocks[head.removeprefix("Current ").lower()] = frames
    return "\n".join(f"{head}\n{frames}" for head, frames in blocks.items())


def _settled_size(file: int, start: int) -> int:
    """Return the size of a file once it has grown beyond `start` and grows no more."""
    deadline_s, size = time.monotonic() + DUMP_S, start
    while time.monotonic() < deadline_s:
        time.sleep(SETTLED_S)
        before, size = size, os.fstat(file).st_size
        if size == before > start:
            break
    return size
