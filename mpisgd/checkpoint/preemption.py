"""Preemption by a batch system: save and end with an exit code of its own.

Slurm and most batch systems send a signal some time before they kill a job. It may reach one rank or all of
them, each at another step, so the ranks agree after every step whether one of them has received it.
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
from mpisgd.config import PREEMPTED, PREEMPTED_NOTE, note
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world

__all__ = ["Preemption", "on_preemption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Whether a rank of the job has received a preemption signal; made by `on_preemption`.

    Attributes:
        told: whether this rank has received the signal; it may differ between ranks.
    """

    def __init__(self, signals: Sequence[signal.Signals], group: Group | None) -> None:
        self.told = False
        self._group = group
        self._pid = os.getpid()
        for number in signals:
            signal.signal(number, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.told = True
        else:  # a forked DataLoader worker: the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self) -> bool:
        """Return whether any rank has received the signal: the same on every rank.

        Collective: all ranks call it after the same steps.

        Cost: an all-reduce of 8 bytes.
        """
        flag = torch.tensor([int(self.told)])
        all_reduce(flag, ReduceOp.MAX, group_or_world(self._group))
        return bool(flag.item())

    def exit(self) -> NoReturn:
        """End the program with the exit code 85 (`mpisgd.config.PREEMPTED`). Every rank calls it.

        `python -m mpisgd run` then ends with that code and does not restart the job.
        """
        note(PREEMPTED_NOTE)
        sys.exit(PREEMPTED)


def on_preemption(signals: Sequence[signal.Signals] = SIGNALS, *, group: Group | None = None) -> Preemption:
    """Record signals instead of ending the program; check for them with `agreed()` after each step.

        preemption = checkpoint.on_preemption()
        for step in range(start, 10_000):
            ...
            if preemption.agreed():
                checkpoint.save("runs/a", step + 1, model=model, optimizer=optimizer)
                preemption.exit()

    Not collective; called on the main thread. From then on SIGTERM does not end the program; SIGKILL does.

    Args:
        signals: to record. mpirun forwards SIGUSR1 to the ranks, but on SIGTERM it ends them at once;
            `python -m mpisgd run` turns SIGTERM into SIGUSR1.
        group: of the ranks that agree; defaults to all processes of the job.

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
