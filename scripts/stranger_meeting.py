"""How a job and the strangers around it wait for each other: by files in a folder that all may write to.

Of each start: the strangers are `ready`, the job says `watch`, they say `watches` once they have noted which
ports are open by then, the job starts and says `done`, they say `refused` or `got in`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

__all__ = ["Port", "announce", "await_all", "leave_root", "visit", "welcome"]

LIMIT_S = 120.0
NOBODY = 65534
LISTENS = "0A"
Port = tuple[str, int]
T = TypeVar("T")


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


def leave_root(name: str) -> None:
    """Become another user, where the name says so and this one is root."""
    if name.startswith("other") and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def open_ports() -> set[Port]:
    """Where somebody listens in IPv4 on this host."""
    with open("/proc/net/tcp") as table:
        entries = [line.split() for line in table.readlines()[1:]]
    places = [entry[1].split(":") for entry in entries if entry[3] == LISTENS]
    return {
        (".".join(str(byte) for byte in reversed(bytes.fromhex(address))), int(port, 16))
        for address, port in places
    }


def welcome(folder: Path, kind: str, start: int, strangers: Iterable[str]) -> None:
    """For the job: return when all strangers of a kind watch for ports to open."""
    names = [*strangers]
    await_all(folder, [f"{name} ready {kind} {start}" for name in names])
    announce(folder, f"watch {kind} {start}")
    await_all(folder, [f"{name} watches {kind} {start}" for name in names])


def visit(
    folder: Path,
    name: str,
    kind: str,
    starts: int,
    prepare: Callable[[int], T],
    attack: Callable[[T, Port, int], bool],
    end: Callable[[T], None],
) -> None:
    """For a stranger: attack each start by the first port that opens.

    Args:
        folder: see the module.
        name: of this stranger.
        kind: of what starts.
        starts: how many there are.
        prepare: what can be done before; given the start's number.
        attack: returns whether this has come in.
        end: of what was prepared.
    """
    for start in range(starts):
        prepared = prepare(start)
        announce(folder, f"{name} ready {kind} {start}")
        await_all(folder, [f"watch {kind} {start}"])  # by now all strangers have ports of their own
        known, done, port = open_ports(), folder / f"done {kind} {start}", None
        announce(folder, f"{name} watches {kind} {start}")
        while port is None and not done.exists():
            port = next((iter(open_ports() - known)), None)
        got_in = port is not None and attack(prepared, port, start)
        said = "saw nothing" if port is None else "got in" if got_in else "refused"
        announce(folder, f"{name} {said} {kind} {start}")
        end(prepared)
