"""Start programs as users do: alone, or under the `mpirun` that belongs to this Python."""

import atexit
import functools
import os
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


@functools.cache
def preloaded_python() -> list[str]:
    """Start the server of preloaded.py, which ends with this process; return the command that uses it."""
    here = Path(__file__).parent
    path = f"{tempfile.mkdtemp(prefix='preloaded-')}/socket"
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
    return [sys.executable, "-I", "-S", str(here / "preloaded_client.py"), path]


def end(server: subprocess.Popen[bytes], path: str) -> None:
    """End a server of preloaded programs."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    shutil.rmtree(Path(path).parent)


def run_python(
    *args: str,
    num_ranks: int | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    quiet_s: float = progress.QUIET_S,
    preloaded: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS`, under `mpirun -n num_ranks OPTIONS` where a number is given; a hang is a failure.

    It hangs when it has said nothing for `quiet_s`, however long the whole takes. Where it is `preloaded`,
    it is forked from a process that has imported torch, see preloaded.py; with --long it never is. Nor is
    a job with fault tolerance, whose ranks end it through their parent, the launcher.
    """
    preloaded = preloaded and "--with-ft" not in options and "MPISGD_TEST_LONG" not in os.environ
    prefix = [] if num_ranks is None else [mpirun(), "-n", str(num_ranks), *options]
    python = preloaded_python() if preloaded else [sys.executable]
    done = progress.run(
        [*prefix, *python, *args],
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        quiet_s=quiet_s,
    )
    done.stderr = done.stderr.replace("\0", "")  # mpirun now and then puts one where a rank ends the job
    return done
