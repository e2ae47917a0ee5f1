"""`Trials`: faults in copies of the package, each tried with the items of the checks that execute it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mutating.items import (
    ARITHMETIC,
    CHECKS,
    COMMANDS,
    DERIVED,
    IN_PROCESS,
    PAIRS_LIMIT_S,
    REFUSED,
    Item,
    items_in_process,
    kinds_of,
    runner,
    try_pairs,
)
from mutating.lines import Lines, Trace
from mutating.operators import Mutant

# What every fault's process needs, and no part of mpisgd, which would be the one without a fault.
os.environ.update(OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONDONTWRITEBYTECODE="1")
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import typer  # noqa: F401

__all__ = ["Found", "Trials"]

LEFT_OUT = (
    ".git",
    ".venv*",
    "runs",
    "site",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".import_linter_cache",
)
LONGEST, PAUSE_S = 4.0, 30.0  # what takes so many times as long, and so much more, hangs
SHORT = "not long"
TRACE_LIMIT_S = 3600.0
TO_END_S = 10.0  # of a job that is told to end
LOG = "trace.log"
RANKS = 3
UNIT = ("tests/unit",)
UNIT_LEFT_OUT = ("accelerator", "bench", "cli", "docs_site", "fuzzing", "gpu_checks", "plan", "verification")
MODES = {"cells": "--quick", "modes": "--all"}  # of `verify`, in a job


class Found(NamedTuple):
    """What became of a fault.

    Attributes:
        check: which found it; "": none.
        item: the part of it.
        is_executed: whether any part of any check executes it.
    """

    check: str
    item: str
    is_executed: bool


class Trials:
    """Tries faults.

    Args:
        root: of the repository.
        folder: for copies of it.
        rooms: in which there are faults: what none of them needs is not traced.
        scored: whether only the checks are run that count for the score.
    """

    def __init__(self, root: Path, folder: Path, rooms: Iterable[str], *, scored: bool = False) -> None:
        torch.set_num_threads(1)
        self._root, self._folder, self._scored = root, folder, scored
        needed = {check for room in rooms for check in _checks(room, scored=scored)}
        self._lines = Lines(self._traced([check for check in COMMANDS if check in needed]))

    def run(self, mutant: Mutant, number: int) -> Found:
        """Put a fault into a copy, and run what executes it until something is red.

        Args:
            mutant: the fault.
            number: of the copy.
        """
        copy = self._copy(number)
        path = copy / "mpisgd" / mutant.path
        right, times = path.read_text(), path.stat()
        path.write_text(mutant.applied(right))
        try:
            return self._first_red(mutant, copy)
        finally:
            path.write_text(right)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled form is valid again

    def _first_red(self, mutant: Mutant, copy: Path) -> Found:
        every = set(self._lines.took_s)
        lines = range(mutant.executed[0], mutant.executed[1] + 1) if mutant.executed else ()
        items = self._lines.items(mutant.path, lines) if mutant.executed else every
        room = mutant.path.partition("/")[0]
        for check in _checks(room, scored=self._scored):
            if check == DERIVED:
                kinds = kinds_of(items)
                seed = zlib.crc32(mutant.name.encode())
                tried = partial(try_pairs, kinds, seed)
                if kinds and (red := _in_fork(tried, copy, LONGEST * PAIRS_LIMIT_S)):
                    return Found(check, red, is_executed=True)
                continue
            mine = sorted(item for item in items if item.check == check)
            mine.sort(key=self._seconds)
            if mine and (red := self._red(check, mine, copy)):
                return Found(check, red, is_executed=True)
        return Found("", "", is_executed=bool(items))

    def _seconds(self, item: Item) -> float:
        return self._lines.took_s.get(item, 0.0)

    def _red(self, check: str, items: Sequence[Item], copy: Path) -> str:
        """Return the first item of a check that is red, "" if none is."""
        limit_s = LONGEST * sum(map(self._seconds, items)) + PAUSE_S
        if check in IN_PROCESS:
            return _in_fork(partial(_first_wrong, items, self._lines.refused), copy, limit_s)
        texts = [item.text for item in items]
        left_out = [f"--deselect={name}" for name in sorted(self._lines.failed)]
        code = _run(_command(check, texts, ["-x", *left_out]), copy, limit_s)
        return f"{len(texts)} files, code {code}" if code else ""

    def _copy(self, number: int) -> Path:
        copy = self._folder / f"copy-{number}" / "mpisgd"
        if not copy.exists():
            shutil.copytree(self._root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        return copy

    def _traced(self, commands: Sequence[str]) -> Path:
        """Return the folder of what executes what; find what was not found with this source before."""
        folder = self._root / "runs" / f"lines-{_source_of(self._root)}"
        for check in ("programs", *commands):
            if (folder / check).exists():
                continue
            draft = self._folder / check
            draft.mkdir()
            began_s = time.monotonic()
            if check == "programs":
                code = _trace_here(self._copy(0), draft)
            else:
                code = _run(
                    _command(check, _texts(check)), self._copy(0), TRACE_LIMIT_S, traced=(check, draft)
                )
            print(f"{check}: traced in {time.monotonic() - began_s:.0f} s, exit code {code}", flush=True)
            if not any(draft.iterdir()):
                raise SystemExit(f"{check}: nothing was traced; see {self._copy(0).parent / LOG}")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(draft, folder / check)
        lines = Lines(folder)
        for name in sorted(lines.failed):
            print(f"left out, since it is red without a fault: {name}")
        return folder


def _checks(room: str, *, scored: bool) -> list[str]:
    parts = CHECKS["arithmetic" if room in ARITHMETIC else "engine"]
    return [check for name, part in parts.items() if name or not scored for check in part]


def _source_of(root: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(
        [*root.glob("mpisgd/**/*.py"), *root.glob("tests/**/*.py"), *root.glob("scripts/fuzzing/*.py")]
    ):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _texts(check: str) -> list[str]:
    """Return what a command runs without a fault: everything."""
    return {"unit": list(UNIT), "mpi": ["tests/mpi"]}.get(check) or [MODES[check]]


def _command(check: str, texts: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    ranks = ["mpirun", "-n", str(RANKS), "--oversubscribe", sys.executable, "-m"]
    if check in MODES:
        return [*ranks, "mutating.cells", *texts]
    pytest = ["pytest", "-q", "-p", "no:cacheprovider", *options]
    if check == "unit":
        left_out = [f"--ignore=tests/unit/{name}" for name in UNIT_LEFT_OUT]
        return [sys.executable, "-m", *pytest, "-m", SHORT, *left_out, *texts]
    return [*ranks, *pytest, "--with-mpi", "-m", f"{SHORT} and not on_threads", *texts]


def _run(command: list[str], copy: Path, limit_s: float, traced: tuple[str, Path] | None = None) -> int:
    """Run a command with the package of a copy; return its exit code, -9 where it had to be ended."""
    env = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'scripts'}"}
    del env["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    if traced is not None:
        env.update(MUTATING_CHECK=traced[0], MUTATING_LINES=str(traced[1]))
        if traced[0] not in MODES:
            env["PYTEST_ADDOPTS"] = "-p mutating.trace_plugin"
    log = copy.parent / (LOG if traced else "trial.log")
    with (
        log.open("w") as out,
        subprocess.Popen(
            command,
            cwd=copy,
            env=env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TO_END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL


def _first_wrong(items: Sequence[Item], refused: Collection[Item]) -> str:
    """Run items; return the first that is red, and what it says, "" if none is.

    Those of `refused` may be refused.
    """
    run = runner()
    for item in items:
        if (said := run(item)) and not (said == REFUSED and item in refused):
            return f"{item.text[:80]}: {said}"
    return ""


def _in_fork(work: Callable[[], str], copy: Path, limit_s: float) -> str:
    """Return what some work says that imports mpisgd from a copy, in a process of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        _become_quiet()
        try:
            _enter(copy)
            said = work()
            os.write(writing, said[:300].encode())
            os._exit(1 if said else 0)
        except BaseException as exc:
            os.write(writing, f"{type(exc).__name__}: {exc}"[:300].encode())
        os._exit(2)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], limit_s)
    if not ready:
        os.killpg(child, signal.SIGKILL)
    said = os.read(reading, 4096).decode(errors="replace") if ready else "hangs"
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"exit code {code}" if code else "")


def _become_quiet() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in (1, 2):
        os.dup2(nowhere, file)


def _enter(copy: Path) -> None:
    """Import mpisgd from a copy from now on."""
    sys.path[:0] = [str(copy), str(copy / "scripts")]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fuzzing", "mpisgd")]:
        raise AssertionError(f"{name} was imported before the fault was there")


def _trace_here(copy: Path, folder: Path) -> int:
    """Trace what needs no job, in a process of its own."""
    if (child := os.fork()) == 0:
        try:
            _enter(copy)
            items = [*items_in_process()]
            trace, run = Trace(), runner()
            for item in items:
                trace.begin(item.name)
                began_s = time.monotonic()
                said = run(item)
                trace.took(item.name, time.monotonic() - began_s)
                if said == REFUSED:
                    trace.refused.add(item.name)
                elif said:
                    print(f"{item}: {said}", flush=True)
                    os._exit(1)
            trace.save(str(folder))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
