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

from mpisgd.monitor.rank_state import GONE, STOPPED, UNRESPONSIVE, RankState

__all__ = ["ProcessIdentity", "identify_this_process", "inspect", "is_gone", "is_stopped_or_gone"]

# One that nobody uses: the first few belong to the C library and to tools, programs take the plain ones.
DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 11 if hasattr(signal, "SIGRTMIN") else 0
DUMP_S = 0.5
SETTLED_S = 0.03
SAMPLE_S = 0.2
MONITOR_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stall_monitor.py")
DUMPED = "all threads, the innermost call first"
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
STATES = {"R": "runs", "S": "sleeps", "D": "waits for a disk or a network file system", "I": "idles"}
# Fields of /proc/PID/stat behind the name: the state, user and system time, and when the process began.
STATE, USER_TIME, SYSTEM_TIME, BEGAN = 0, 11, 12, 19


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
    fields = _fields(os.getpid())
    return ProcessIdentity(os.getpid(), int(fields[BEGAN]) if fields else 0, _dumps())


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


def _fields(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped_or_gone(seat: ProcessIdentity) -> bool:
    """Return whether a process of this host will not answer for sure."""
    fields = _fields(seat.pid)
    return _is_gone(fields, seat) or fields[STATE] in "Tt"


def is_gone(seat: ProcessIdentity) -> bool:
    """Return whether a process of this host is no more."""
    return _is_gone(_fields(seat.pid), seat)


def _is_gone(fields: list[str], seat: ProcessIdentity) -> bool:
    return not fields or fields[STATE] in "ZX" or (seat.began > 0 and int(fields[BEGAN]) != seat.began)


def inspect(rank: int, host: str, seat: ProcessIdentity, watched_s: float, *, deep: bool) -> RankState:
    """Return the state of a rank of this host that does not answer.

    Args:
        rank: its global rank.
        host: name of this host.
        seat: where it is.
        watched_s: how long it was waited for.
        deep: whether a process that runs is sent the signal that dumps its stacks. A system call that it
            sleeps in may end early of that.
    """
    fields = _fields(seat.pid)
    if _is_gone(fields, seat):
        return RankState(rank, host, seat.pid, GONE, note="its process is gone")
    if fields[STATE] in "Tt":
        return RankState(rank, host, seat.pid, STOPPED, note=_stopped(fields[STATE]))
    before_s, began_s = _cpu_s(fields), time.monotonic()
    text = _dumped(seat) if deep else ""
    time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - began_s)))
    share = max(0.0, _cpu_s(_fields(seat.pid)) - before_s) / (time.monotonic() - began_s)
    state = STATES.get(fields[STATE], f"is in state {fields[STATE]}")
    note = (
        f"its process {state} ({share:.0%} of a core) but has not let Python's threads run for "
        f"{watched_s:.1f} s: in C code that keeps Python's interpreter lock, or short of time"
    )
    return RankState(rank, host, seat.pid, UNRESPONSIVE, stacks={DUMPED: text} if text else {}, note=note)


def _stopped(state: str) -> str:
    by = "by a debugger" if state == "t" else "by a signal (kill -CONT lets it go on)"
    return f"its process is stopped {by}"


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])) / TICKS_PER_S if fields else 0.0


_one_at_a_time = threading.Lock()


def _dumped(seat: ProcessIdentity) -> str:
    """Let a process dump its stacks, and return them; "" where it cannot."""
    if seat.dumps < 0:
        return ""
    try:
        file = os.open(f"/proc/{seat.pid}/fd/{seat.dumps}", os.O_RDONLY)
    except OSError:
        return ""
    try:
        with _one_at_a_time:
            start = os.fstat(file).st_size
            os.kill(seat.pid, DUMP_SIGNAL)
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
