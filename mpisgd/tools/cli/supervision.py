"""A launcher as a child: signals go through to it, and nothing it has started outlives it.

mpirun gives the ranks half a second between SIGTERM and SIGKILL, too short to save anything. So the first
SIGTERM reaches the ranks as SIGUSR1, which `mpisgd.checkpoint.on_preemption` takes for the same; a program
that does not is ended by it. The second one is passed on as it is.

What the launcher writes on stderr is shown without the notices that follow an error of ours. When a rank ends
the job after an error, Open MPI frames two notices between lines of dashes: that MPI_ABORT was invoked, and
which process did. They say nothing that the error does not say, and may come before it. It ends them with a
zero byte, which is dropped, too. All else is passed on as it comes, unfinished lines included.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

import psutil

__all__ = ["NoticeFilter", "Supervisor", "processes_of"]

RULE = b"-" * 74 + b"\n"
DROPPED = (b"MPI_ABORT was invoked on rank ", b"prterun has exited due to process rank ")
MOST_LINES = 12  # of a notice
# The second notice is also about other ends; those are passed on.
ABORTED = b'"abort"'


class NoticeFilter:
    """Takes what a launcher writes, in pieces of any size, and returns what is to be shown."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []  # a notice that has begun
        self._rest = b""  # an unfinished line that may be a part of one

    def feed(self, data: bytes) -> bytes:
        """Return the text that can be shown by now."""
        *lines, rest = (self._rest + data.replace(b"\0", b"")).split(b"\n")
        shown = b"".join(self._take(line + b"\n") for line in lines)
        begins = self._lines or RULE.startswith(rest)
        self._rest = rest if begins else b""
        return shown if begins else shown + rest

    def close(self) -> bytes:
        """Return the rest of the text at the end."""
        return self._release() + self._rest

    def _take(self, line: bytes) -> bytes:
        if not self._lines:
            if line != RULE:
                return line
            self._lines = [line]
            return b""
        self._lines.append(line)
        if line == RULE and self._is_dropped():
            self._lines = []
            return b""
        goes_on = self._lines[1].startswith(DROPPED) and line != RULE and len(self._lines) < MOST_LINES
        return b"" if goes_on else self._release()

    def _is_dropped(self) -> bool:
        text = b"".join(self._lines[1:-1])
        return text.startswith(DROPPED[0]) or (text.startswith(DROPPED[1]) and ABORTED in text)

    def _release(self) -> bytes:
        lines, self._lines = self._lines, []
        return b"".join(lines)


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LEFTOVERS_LIMIT_S = 5.0


class Supervisor:
    """Runs one command at a time. Makes the process's signals its own; for the main thread.

    Attributes:
        stopped_by: the first signal that asked for the end of it all, None as long as there was none.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None
        for number in FORWARDED:
            signal.signal(number, self._forward)

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Return the exit code of a command, as a shell would give it (128 + n for signal n).

        Raises:
            OSError: it cannot be started.
        """
        child = subprocess.Popen(
            command,
            env=dict(env),
            start_new_session=True,
            preexec_fn=_tied_to_parent(),
            stderr=subprocess.PIPE,
        )
        errors = threading.Thread(target=_pass_on, args=(child.stderr,), daemon=True)
        errors.start()
        self._child = child
        if self.stopped_by is not None:  # it came a moment before there was anyone to tell
            child.send_signal(signal.SIGTERM)
        try:
            code = child.wait()
        finally:
            self._child = None
            _end_session(child.pid)
            errors.join(LEFTOVERS_LIMIT_S)
        return code if code >= 0 else 128 - code

    def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until a signal that asks for the end."""
        until = time.monotonic() + seconds
        while self.stopped_by is None and time.monotonic() < until:
            time.sleep(0.05)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        sent = signal.SIGTERM if number == signal.SIGHUP else number
        if self.stopped_by is None and number in STOPPING:
            self.stopped_by = signal.Signals(number)
            sent = signal.SIGUSR1 if number == signal.SIGTERM else sent
        if self._child is not None:
            self._child.send_signal(sent)


def _pass_on(source: IO[bytes]) -> None:
    """Write what the launcher writes on stderr, without its notices of an abort, until it has ended."""
    notices = NoticeFilter()
    with source:
        while data := os.read(source.fileno(), 1 << 16):
            _write(notices.feed(data))
    _write(notices.close())


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever has read it has ended
        while data:
            data = data[os.write(2, data) :]


def _tied_to_parent() -> Callable[[], None] | None:
    """Return a function by which a child ends with this process, whatever ends that, if there is one."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _end_session(session: int) -> None:
    """End the processes that a launcher has left: its ranks have groups of their own, but one session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + LEFTOVERS_LIMIT_S
        left = list(processes_of(session))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while left and time.monotonic() < until:
            time.sleep(0.02)
            left = list(processes_of(session))
        if not left:
            return


def processes_of(session: int) -> Iterator[int]:
    """Return the processes of a session that still run."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
