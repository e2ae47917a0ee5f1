"""Processes that are waited for as long as they make progress: what is slow goes on, what hangs is ended.

A limit on the whole time fails on a slow machine, or has to be so long that a hang costs as much. So a
process hangs when it, and whatever it has started, has written nothing for a while.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

QUIET_S = 180.0  # three times what any program of the tests takes that says nothing before its end
LOOK_S = 0.5
END_S = 10.0


class Hung(Exception):
    """A process that has written nothing for too long; it has been ended."""


def wait(process: subprocess.Popen[bytes], written: Sequence[Path], quiet_s: float = QUIET_S) -> int:
    """Return the exit code of a process.

    Args:
        process: ended by `stop` where it hangs, or this wait is interrupted.
        written: what it and its children write: files, or folders of files.
        quiet_s: how long none of these may grow.

    Raises:
        Hung: one that did not grow.
    """
    size, since = -1, time.monotonic()
    try:
        while True:
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            if (found := sum(map(_size, written))) != size:
                size, since = found, time.monotonic()
            elif time.monotonic() - since > quiet_s:
                raise Hung(f"no progress for {quiet_s:g} s")
    except BaseException:
        stop(process)
        raise


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(map(_size, path.iterdir()))
    return path.stat().st_size if path.exists() else 0


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process; mpirun takes its ranks along when it is asked first."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        if os.getpgid(process.pid) == process.pid:  # a session of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    written: Sequence[Path] = (),
    quiet_s: float = QUIET_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command as subprocess.run does with its output captured; see `wait` for the other arguments.

    Raises:
        Hung: with what it has said.
    """
    with tempfile.NamedTemporaryFile("w+b") as out, tempfile.NamedTemporaryFile("w+b") as err:
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            code = wait(process, [Path(out.name), Path(err.name), *written], quiet_s)
        except Hung as exc:
            raise Hung(f"{exc}: {command}\n{_text(out)}\n{_text(err)}") from None
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").replace("\r\n", "\n")
