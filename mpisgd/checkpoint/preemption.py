"""A batch system wants the machine back: save, and leave with a code that says so.

Slurm, and most others, send a signal some time before they kill. It may reach every rank, or one of them, and
each at another step; so the ranks ask each other at every step whether one of them has been told to stop.
"""

import os
import signal
import sys
from collections.abc import Sequence, Set
from types import FrameType
from typing import NoReturn

import torch

from mpisgd.arguments import shown
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.config import PREEMPTED
from mpisgd.core.dtypes import ReduceOp
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world

__all__ = ["Preemption", "on_preemption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Whether a rank of the job was told to stop; made by `on_preemption`."""

    def __init__(self, signals: Sequence[signal.Signals], group: Group | None) -> None:
        self._group = group
        self._told = False
        self._pid = os.getpid()
        for number in signals:
            signal.signal(number, self._take_note)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._told = True
        else:  # a forked worker of a DataLoader: what a signal does to any process
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def told(self) -> bool:
        """Whether this rank has got the signal; another may have, or not yet."""
        return self._told

    def agreed(self) -> bool:
        """Return whether any rank has been told to stop: the same on every rank.

        Collective: all ranks call it after the same steps.

        Cost: an all-reduce of 8 bytes.
        """
        flag = torch.tensor([int(self._told)])
        all_reduce(flag, ReduceOp.MAX, group_or_world(self._group))
        return bool(flag.item())

    def exit(self) -> NoReturn:
        """End the program with the exit code 85 (`mpisgd.config.PREEMPTED`). Every rank calls it.

        `python -m mpisgd run` ends with that code then, and does not start the job again.
        """
        sys.exit(PREEMPTED)


def on_preemption(signals: Sequence[signal.Signals] = SIGNALS, *, group: Group | None = None) -> Preemption:
    """Take note of signals instead of dying of them; ask for them with `agreed()` after each step.

        preemption = checkpoint.on_preemption()
        for step in range(start, 10_000):
            ...
            if preemption.agreed():
                checkpoint.save("runs/a", step + 1, model=model, optimizer=optimizer)
                preemption.exit()

    Not collective, for the main thread. From then on SIGTERM does not end the program; SIGKILL does.

    Args:
        signals: to take note of; mpirun hands SIGUSR1 on to the ranks. Of SIGTERM it hands on nothing that
            leaves time to save; `python -m mpisgd run` turns it into SIGUSR1.
        group: of the ranks that ask each other; defaults to all processes of the job.

    Raises:
        InvalidArgument: a signal that cannot be caught, or this is not the main thread.
    """
    if group is not None:
        group_or_world(group)
    listed = list(signals) if isinstance(signals, (Sequence, Set)) else [None]
    if isinstance(signals, (str, bytes)) or not all(isinstance(number, int) for number in listed):
        raise InvalidArgument(f"on_preemption: signals={shown(signals)}; expected a list of signals")
    try:
        return Preemption(signals, group)
    except (OSError, ValueError) as exc:
        raise InvalidArgument(f"on_preemption: signals={shown(signals)}: {exc}") from exc
