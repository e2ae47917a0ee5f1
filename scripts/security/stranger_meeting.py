"""How a job and the strangers around it wait for each other: by files in a folder that all may write to.

A start has phases: `start`, when the first port opens, `run`, when all ranks have connected, and `end`, when
they begin to leave. Of each phase the strangers are `ready`, the job says that it has come, and they say
`refused`, `got in` or `saw nothing`. At the start they say `watches` in between, once they have noted which
ports are open by then; at the end the job does not wait for them.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

LIMIT_S = 60.0
NOBODY = 65534
LISTENS = "0A"
OVER = "over"  # there is no job any more
PHASES = ("start", "run", "end")
OUTCOMES = ("refused", "got in", "saw nothing")
Port = tuple[str, int]
T = TypeVar("T")


def announce(folder: Path, what: str) -> None:
    """Say that something has happened."""
    (folder / what).touch()


def await_all(folder: Path, wanted: Iterable[str], limit_s: float = LIMIT_S) -> None:
    """Return when all of these things have happened."""
    missing, deadline = set(wanted), time.monotonic() + limit_s
    while missing := {what for what in missing if not (folder / what).exists()}:
        if (folder / OVER).exists():
            raise SystemExit
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
    announce(folder, f"next {kind} {start}")
    await_all(folder, [f"{name} ready {kind} {start} start" for name in names])
    announce(folder, f"{kind} {start} start")
    await_all(folder, [f"{name} watches {kind} {start}" for name in names])


def meet(folder: Path, kind: str, start: int, phase: str, strangers: Iterable[str]) -> None:
    """For the job: have all strangers of a kind attack now, and wait for them unless the job ends now."""
    names = [*strangers]
    announce(folder, f"opened {kind} {start}")  # whoever has not seen the port by now saw nothing
    await_all(folder, [f"{name} ready {kind} {start} {phase}" for name in names])
    announce(folder, f"{kind} {start} {phase}")
    if phase == "run":
        await_all(folder, [f"{name} tried {kind} {start} {phase}" for name in names])


def visit(
    folder: Path,
    name: str,
    kind: str,
    starts: int,
    prepare: Callable[[], T],
    attack: Callable[[T, Port, str], bool],
    end: Callable[[T], None],
) -> None:
    """For a stranger: attack each start by the first port that opens, and that port again later.

    Args:
        folder: see the module.
        name: of this stranger.
        kind: of what starts.
        starts: how many there are.
        prepare: what can be done before each attack.
        attack: returns whether this has come in; the text is the attack's own.
        end: of what was prepared.
    """
    for start in range(starts):
        port, opened = None, f"opened {kind} {start}"
        # Ports of one's own open when nobody watches for any: strangers would attack each other.
        await_all(folder, [f"next {kind} {start}"])
        for phase in PHASES:
            prepared = prepare()
            announce(folder, f"{name} ready {kind} {start} {phase}")
            await_all(folder, [f"{kind} {start} {phase}"])
            if phase == "start":
                known = open_ports()  # by now all strangers have ports of their own
                announce(folder, f"{name} watches {kind} {start}")
                while port is None and not any((folder / what).exists() for what in (opened, OVER)):
                    port = next((iter(open_ports() - known)), None)
            got_in = port is not None and attack(prepared, port, f"{kind}-{start}-{phase}")
            said = "saw nothing" if port is None else "got in" if got_in else "refused"
            announce(folder, f"{name} {said} {kind} {start} {phase}")
            announce(folder, f"{name} tried {kind} {start} {phase}")
            if phase == "start":
                await_all(folder, [opened])
            end(prepared)
