"""`KnownResults`: what became of programs, kept in a file, so that a long run can be stopped and goes on.

    runs = KnownResults.of_source(folder)     # the file is named by a hash of all that the results depend on
    runs.run(program, backend.run)            # found in the file, or run and added to it

Several processes may add to the file: each line is written at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import mpisgd
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.program import Program

__all__ = ["KnownResults", "OutOfTime", "results_file"]

DIGEST_BYTES = 16


class OutOfTime(Exception):  # no error: it ends a run
    """A program was to be run after the time was over."""


def results_file(folder: Path) -> Path:
    """Return the file in a folder that has the results of this source, with these versions."""
    told = hashlib.blake2b(f"{torch.__version__} {np.__version__}".encode(), digest_size=DIGEST_BYTES)
    package = Path(str(mpisgd.__file__)).parent
    for path in sorted(package.rglob("*.py")):
        told.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return folder / f"verify-{told.hexdigest()}.jsonl"


class KnownResults:
    """The results in a file.

    Args:
        path: of the file, which need not be there.
        ends_at_s: by `time.time()`; from then on nothing is run that is not known. 0: there is no limit.
    """

    def __init__(self, path: Path, ends_at_s: float = 0.0) -> None:
        self._path, self._ends_at_s = path, ends_at_s
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = dict(map(_entry, filter(None, lines)))

    def __len__(self) -> int:
        return len(self._known)

    def run(self, program: Program, run: Callable[[Program], Verdict]) -> Verdict:
        """Return the outcome of a program, known or found now; without the bits.

        Raises:
            OutOfTime: it is not known, and the time is over.
        """
        key = hashlib.blake2b(repr(program).encode(), digest_size=DIGEST_BYTES).hexdigest()
        if key not in self._known:
            if self._ends_at_s and time.time() > self._ends_at_s:
                raise OutOfTime
            verdict = run(program)
            self._known[key] = verdict.kind, verdict.text
            self._add(json.dumps([key, verdict.kind, verdict.text]))
        kind, text = self._known[key]
        return Verdict(kind, text)

    def _add(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"\n{line}\n".encode())  # where one was cut off, the next begins anew
        finally:
            os.close(descriptor)


def _entry(line: str) -> tuple[str, tuple[str, str]]:
    try:
        key, kind, text = json.loads(line)
    except ValueError:  # a process was ended while it wrote
        return "", ("", "")
    return key, (kind, text)
