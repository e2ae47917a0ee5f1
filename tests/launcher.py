"""Start programs as users do: alone, or under the `mpirun` that belongs to this Python."""

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import progress

# More ranks than cores, and root in a container, said in the environment: MPICH's mpirun has no such options.
# And what is tested must not depend on what someone has measured here.
ENVIRONMENT = {
    "MPISGD_PROFILE": "built-in",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def mpirun() -> str:
    """The launcher installed beside this Python, else the first on the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this Python or on the PATH"
    return found


# What preloaded.py cannot do as Python does it has a start of Python.
PRELOADED = """#!/bin/sh
case "$1" in -[Wcm] | [!-]*) exec {python} -I -S {client} {path} "$@" ;; esac
exec {python} "$@"
"""


@functools.cache
def preloaded_python() -> str:
    """Start the server of preloaded.py, which ends with this process; return a `python` that uses it.

    An `mpirun` is beside it.
    """
    here = Path(__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
    path, python = str(folder / "socket"), folder / "python"
    words = {"python": sys.executable, "client": here / "preloaded_client.py", "path": path}
    python.write_text(PRELOADED.format(**{name: shlex.quote(str(word)) for name, word in words.items()}))
    python.chmod(0o755)
    (folder / "mpirun").symlink_to(mpirun())
    server = subprocess.Popen(
        [sys.executable, str(here / "preloaded.py"), path],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},  # our backend is loaded by each program
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    server.stdout.close()
    atexit.register(end, server, path)
    return str(python)


def end(server: subprocess.Popen[bytes], path: str) -> None:
    """End a server of preloaded programs."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    shutil.rmtree(Path(path).parent)


def python(*, fresh: bool = False) -> str:
    """A `python` to run programs with.

    It forks them from a process that has imported torch, see preloaded.py, unless it must be a `fresh` start
    of Python; with --long it always is one.
    """
    return sys.executable if fresh or "MPISGD_TEST_LONG" in os.environ else preloaded_python()


def run_python(
    *args: str,
    num_ranks: int | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    quiet_s: float = progress.QUIET_S,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS`, under `mpirun -n num_ranks OPTIONS` where a number is given; a hang is a failure.

    It hangs when it has said nothing for `quiet_s`, however long the whole takes.
    """
    prefix = [] if num_ranks is None else [mpirun(), "-n", str(num_ranks), *options]
    done = progress.run(
        [*prefix, python(fresh=fresh), *args],
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        quiet_s=quiet_s,
    )
    done.stderr = done.stderr.replace("\0", "")  # mpirun now and then puts one where a rank ends the job
    return done
