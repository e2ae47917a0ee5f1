"""`preloaded_python`: a `python` whose programs are forked from a process that has imported torch."""

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# What preloaded.py cannot do as Python does it has a start of Python.
PROGRAM = """#!/bin/sh
case "$1" in -[Wcm] | [!-]*) exec {python} -I -S {client} {path} "$@" ;; esac
exec {python} "$@"
"""


def preloaded_python(modules: Sequence[str] = (), *, executable: str = "") -> str:
    """Start the server of preloaded.py, which ends with this process; return a `python` that uses it.

    Args:
        modules: what it is to import beside what it always does.
        executable: what `sys.executable` is in the programs; what is returned, by default.
    """
    here = Path(__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
    path, python = str(folder / "socket"), folder / "python"
    words = {"python": sys.executable, "client": here / "preloaded_client.py", "path": path}
    python.write_text(PROGRAM.format(**{name: shlex.quote(str(word)) for name, word in words.items()}))
    python.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(here / "preloaded.py"), path, executable or str(python), *modules],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},  # our backend is loaded by each program
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    server.stdout.close()
    atexit.register(_end, server, folder)
    return str(python)


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    shutil.rmtree(folder)
