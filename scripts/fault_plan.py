"""What is done to a run, and when: chosen by a seed, written to a file that its ranks read.

A fault strikes at a moment of a step, not at a time: so it hits what it is meant for on any machine. When the
rank comes to that moment it tells its injector, a process of its own, which waits for `delay_s` and acts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["MOMENTS", "Fault", "draw", "read", "write"]

# Of a step; `commit` and `checkpoint` come only every few steps.
MOMENTS = ("between", "forward", "backward", "collective", "update", "commit", "checkpoint")

# A moment lasts about as long: the fault then falls before it, into it, or right behind it.
MAX_DELAY_S = 0.004


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: `kill` (the process), `stop` (it sleeps for `lasts_s`, 0: for ever), `link-down` (of its host,
            for ever), `link-slow` (to `rate`, for `lasts_s`) or `fill-disk` (the one with the checkpoints,
            for `lasts_s`).
        rank: to whom, as ranks are numbered then.
        step: in which step.
        moment: where in it.
        delay_s: how long after that.
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
        rng: decides.
        ranks: who may be hit.
        steps: when.
        every: after how many steps there is a commit and a checkpoint, at the end of the last of them.
        moments: where.
        lasts_s: see `Fault`, as for `rate`.
    """
    moment, step = rng.choice(list(moments)), rng.choice(steps)
    if moment in ("commit", "checkpoint"):
        step = min(step // every * every + every - 1, steps[-1] // every * every - 1)
    return Fault(kind, rng.choice(list(ranks)), step, moment, rng.uniform(0, MAX_DELAY_S), lasts_s, rate)


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Put a plan where the ranks find it."""
    path.write_text(json.dumps([asdict(fault) for fault in faults]))


def read(path: Path) -> list[Fault]:
    """The faults of a plan; none where there is no such file."""
    return [Fault(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
