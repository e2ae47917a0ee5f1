"""The plan of a run's faults, chosen by a seed and written to a file that its ranks read.

A fault is planned for a moment of a step, not for a time, so it hits its target on any machine. When the rank
reaches that moment it notifies its injector, a separate process, which waits for `delay_s` and acts.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["MOMENTS", "Fault", "draw", "read", "write"]

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
