"""Start programs as users do: alone, or under the `mpirun` that belongs to this Python."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import progress
from preloaded_python import preloaded_python

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


# What many of the programs import beside torch, some for longer than they run; none of it loads MPI.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "mpisgd.checkpoint",
    "mpisgd.optim.distributed",
)


@functools.cache
def preloaded() -> str:
    """A `python` that forks its programs, with an `mpirun` beside it."""
    python = preloaded_python(PRELOADED)
    Path(python).with_name("mpirun").symlink_to(mpirun())
    return python


def python(*, fresh: bool = False) -> str:
    """A `python` to run programs with.

    It forks them from a process that has imported torch, see preloaded.py, unless it must be a `fresh` start
    of Python; with --long it always is one.
    """
    return sys.executable if fresh or "MPISGD_TEST_LONG" in os.environ else preloaded()


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
