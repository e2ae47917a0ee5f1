"""Emulated hosts: the command that starts a job on several of them on this machine, where that is possible.

It is `scripts/cluster` of a checkout, or another one with the same options:

    COMMAND --check                                          exit code 0 if it can
    COMMAND --hosts 2,1 --mpirun "-x NAME" -- PROGRAM ...    two ranks on the first host, one on the second
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mpisgd
from mpisgd.errors import JobError

__all__ = ["PRETENDED", "checked", "find_cluster", "on_hosts"]

PRETENDED = "none"  # as a command: let ranks of one host count as those of several
CHECK_LIMIT_S = 30.0
FORWARDED = ("MPISGD_", "OMP_NUM_THREADS")  # beginnings of variables; a login on a host knows none of them


def find_cluster(text: str) -> list[str]:
    """Return the words of a command; by default those of this checkout, or none outside of one."""
    if text:
        return [] if text == PRETENDED else shlex.split(text)
    program = Path(mpisgd.__file__).resolve().parents[1] / "scripts" / "emulation" / "virtual_cluster.py"
    return [sys.executable, str(program)] if program.is_file() else []


def checked(command: Sequence[str]) -> str:
    """Return why a command cannot emulate hosts here, "" if it can."""
    if not command:
        return "no command that emulates hosts; name one with --cluster"
    try:
        words = [*command, "--check"]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=CHECK_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except OSError as exc:
        raise JobError(f"--cluster: cannot start {command[0]}: {exc.strerror}") from exc
    except subprocess.TimeoutExpired:
        return f"no answer from {command[0]} within {CHECK_LIMIT_S:.0f} s"
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def on_hosts(
    command: Sequence[str],
    slots: Sequence[int],
    program: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the words that start a program with so many ranks on each host, with variables of ours."""
    forwarded = [word for name in sorted(environment) if name.startswith(FORWARDED) for word in ("-x", name)]
    hosts = ",".join(map(str, slots))
    return [*command, "--hosts", hosts, f"--mpirun={shlex.join(forwarded)}", "--", *program]
