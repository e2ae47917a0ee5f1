"""How a job and the strangers around it wait for each other: by files in a folder that all may write to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["LIMIT_S", "announce", "await_all", "leave_root"]

LIMIT_S = 120.0
NOBODY = 65534


def announce(folder: Path, what: str) -> None:
    """Say that something has happened."""
    (folder / what).touch()


def await_all(folder: Path, wanted: Iterable[str], limit_s: float = LIMIT_S) -> None:
    """Return when all of these things have happened."""
    missing, deadline = set(wanted), time.monotonic() + limit_s
    while missing := {what for what in missing if not (folder / what).exists()}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s: {', '.join(sorted(missing))}")
        time.sleep(0.002)


def leave_root() -> None:
    """Become another user, where this one is root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
