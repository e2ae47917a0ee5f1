"""Fault injection: a process beside each rank that executes a plan of faults and logs them.

It is forked before MPI and torch are loaded, and ends when the rank does. The plan of a run's faults is
chosen by a seed and written to a file that its ranks read. A fault is planned for a moment of a step, not for
a time, so it hits its target on any machine. When the rank reaches that moment it notifies its injector,
which waits for `delay_s` and acts.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Of a step; `commit` and `checkpoint` come only every few steps.
MOMENTS = ("between", "forward", "backward", "collective", "update", "commit", "checkpoint")

# About as long as a moment lasts, so the fault falls before, into or right after it.
MAX_DELAY_S = 0.004


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: `kill` (the process), `stop` (it sleeps for `lasts_s`, 0: for ever), `link-down` (of its host,
            for ever), `link-slow` (to `rate`, for `lasts_s`) or `fill-disk` (the one with the checkpoints,
            for `lasts_s`).
        rank: the target, by its rank at that time.
        step: of the fault.
        moment: of the step.
        delay_s: after the moment.
    """

    kind: str
    rank: int
    step: int
    moment: str
    delay_s: float = 0.0
    lasts_s: float = 0.0
    rate: str = ""


def draw(
    kind: str,
    rng: random.Random,
    *,
    ranks: Sequence[int],
    steps: range,
    every: int,
    moments: Sequence[str] = MOMENTS,
    lasts_s: float = 0.0,
    rate: str = "",
) -> Fault:
    """Choose a fault.

    Args:
        kind: see `Fault`.
        rng: random number generator.
        ranks: possible targets.
        steps: possible steps.
        every: steps between two commits and checkpoints, which come at the end of the last of them.
        moments: possible moments.
        lasts_s: see `Fault`, as for `rate`.
    """
    moment, step = rng.choice(list(moments)), rng.choice(steps)
    if moment in ("commit", "checkpoint"):
        step = min(step // every * every + every - 1, steps[-1] // every * every - 1)
    return Fault(kind, rng.choice(list(ranks)), step, moment, rng.uniform(0, MAX_DELAY_S), lasts_s, rate)


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Write a plan to the file that the ranks read."""
    path.write_text(json.dumps([asdict(fault) for fault in faults]))


def read(path: Path) -> list[Fault]:
    """The faults of a plan; none without such a file."""
    return [Fault(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


class Journal:
    """The event log of a process: lines of JSON with the time, in a file of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **facts: object) -> None:
        """Add a line. The clock is the machine's, the same for all of its processes."""
        line = json.dumps({"event": event, "t": time.monotonic(), "pid": os.getpid(), **facts})
        os.write(self._file, line.encode() + b"\n")


class FaultPoints:
    """The fault injection points of a rank. Make it before anything else is imported.

    Args:
        folder: with `plan.json`; the event logs are written into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan = read(folder / "plan.json")
        self._orders = -1
        if self._plan:
            reading, self._orders = os.pipe()
            rank = os.getpid()
            if os.fork() == 0:
                os.close(self._orders)
                _serve(reading, rank, folder)
            os.close(reading)

    @contextlib.contextmanager
    def at(self, moment: str, step: int, rank: int) -> Iterator[None]:
        """Inject the faults planned for a moment of a step."""
        for number, fault in enumerate(self._plan):
            if (fault.moment, fault.step, fault.rank) == (moment, step, rank) and self._is_first(number):
                os.write(self._orders, f"{number}\n".encode())
        yield

    def _is_first(self, number: int) -> bool:
        """Whether this fault is still to be injected: after a recovery, steps are repeated."""
        try:
            os.close(os.open(self._folder / f"done-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _serve(orders: int, rank: int, folder: Path) -> None:
    """Inject faults on request until the rank is gone. Does not return."""
    journal, plan = Journal(folder, f"injector-{os.getpid()}"), read(folder / "plan.json")
    with os.fdopen(orders) as lines:
        for line in lines:
            fault = plan[int(line)]
            time.sleep(fault.delay_s)
            journal.write("fault", number=int(line), **asdict(fault))
            with contextlib.suppress(ProcessLookupError):
                _perform(fault, rank, folder)
    os._exit(0)


def _perform(fault: Fault, rank: int, folder: Path) -> None:
    if fault.kind == "kill":
        os.kill(rank, signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(rank, signal.SIGSTOP)
        if fault.lasts_s:
            time.sleep(fault.lasts_s)
            os.kill(rank, signal.SIGCONT)
    elif fault.kind == "link-down":
        _system("ip", "link", "set", "eth0", "down")
    elif fault.kind == "link-slow":
        before = "1gbit"
        _system(*LIMIT, fault.rate)
        time.sleep(fault.lasts_s)
        _system(*LIMIT, before)
    elif fault.kind == "fill-disk":
        filler = folder / "checkpoints" / "filler"
        _fill(filler)
        time.sleep(fault.lasts_s)
        filler.unlink()


def _fill(filler: Path) -> None:
    """Write until the disk is full."""
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))


LIMIT = ("tc", "qdisc", "change", "dev", "eth0", "root", "tbf", "burst", "131072", "latency", "20ms", "rate")


def _system(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
