"""A launcher as a child: signals go through to it, and nothing it has started outlives it.

mpirun gives the ranks half a second between SIGTERM and SIGKILL, too short to save anything. So the first
SIGTERM reaches the ranks as SIGUSR1, which `mpisgd.checkpoint.on_preemption` takes for the same; a program
that does not is ended by it. The second one is passed on as it is.
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

from mpisgd.tools.cli.notices import NoticeFilter

__all__ = ["Supervisor"]

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
        left = list(_members(session))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while left and time.monotonic() < until:
            time.sleep(0.02)
            left = list(_members(session))
        if not left:
            return


def _members(session: int) -> Iterator[int]:
    """Return the processes of a session that still run."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
