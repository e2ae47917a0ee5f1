"""The checks that are to find a fault, the quickest first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["ARITHMETIC", "ENGINE", "ROOMS", "Check", "Outcome", "checks_for"]

# By room of the package: which score it counts for.
ARITHMETIC = ("collectives", "compress", "gradients", "methods", "optim", "parameters", "sharding")
ENGINE = ("checkpoint", "core", "elastic", "job", "monitor", "threads", "transport")
ROOMS = (*ARITHMETIC, *ENGINE)
PYTHON = sys.executable
RANKS = ("mpirun", "-n", "3", "--oversubscribe", PYTHON, "-m", "pytest", "--with-mpi")


class Outcome(NamedTuple):
    """What became of a check: whether it was red, and after how long."""

    is_red: bool
    seconds: float


class Check(NamedTuple):
    """A command that is red where it ends with another code than 0, or not in time.

    Attributes:
        name: of the check.
        words: the command, run in `folder`.
        folder: from the root of the copy on.
    """

    name: str
    words: tuple[str, ...]
    folder: str = "."

    def run(self, root: Path, limit_s: float) -> Outcome:
        """Run it in a copy of the repository, with the package of that copy.

        Args:
            root: of the copy.
            limit_s: after which it counts as red: a hang.
        """
        env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        started_s = time.monotonic()
        with subprocess.Popen(
            self.words,
            cwd=root / self.folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                is_red = process.wait(limit_s) != 0
            except subprocess.TimeoutExpired:
                is_red = True
                os.killpg(process.pid, 9)
        return Outcome(is_red, time.monotonic() - started_s)


def _tests(kind: str, room: str, root: Path) -> tuple[str, ...]:
    """Return the folder of a room's tests, if it has one."""
    known = {"collectives": ("collectives",), "methods": ("methods", "strategies", "compress")}
    folders = [f"tests/{kind}/{name}" for name in known.get(room, (room,))]
    return tuple(folder for folder in folders if (root / folder).is_dir())


def checks_for(room: str, root: Path, *, deep: bool) -> list[Check]:
    """Return the checks of a room.

    Args:
        room: the folder of the package that is changed.
        root: of the copy.
        deep: whether the long ones follow.
    """
    programs = 1500 if deep else 200
    fuzz = Check(
        f"fuzz, {programs} programs",
        (PYTHON, "-m", "fuzzing.main", "--backend", "threads", "--programs", str(programs), "--seed", "1"),
        "scripts",
    )
    quick = Check("verify --quick", (PYTHON, "-m", "mpisgd", "verify", "--quick"))
    if room in ARITHMETIC:
        whole = Check("verify", (PYTHON, "-m", "mpisgd", "verify"))
        return [fuzz, quick, *([whole] if deep else [])]
    found = []
    if unit := _tests("unit", room, root):
        found.append(Check("unit tests", (PYTHON, "-m", "pytest", "-q", "-x", "-m", "not long", *unit)))
    words = (PYTHON, "-m", "fuzzing.main", "--schedules", "150", "--seed", "1")
    found.append(Check("schedules", words, "scripts"))
    if mpi := _tests("mpi", room, root):
        found.append(Check("tests on 3 ranks", (*RANKS, "-q", "-x", "-m", "not long", *mpi)))
    return [*found, quick, fuzz]
