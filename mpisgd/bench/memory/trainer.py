"""The program whose memory is measured: `python -m mpisgd.bench.memory.trainer FOLDER RUN`, on every rank.

It trains for some steps, with mpisgd or without, and leaves in FOLDER `rank-R.pid` at its start and
`rank-R.json` at its end: its memory where that is largest (gradients are all there, the optimizer has made
its state), and what its parameters add up to, which tells whether the ranks did train together. Without
mpisgd it loads no MPI at all.
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mpisgd
from mpisgd.bench.cases import BATCHES
from mpisgd.bench.memory.peak import NONE, STARTED, TrainingRun
from mpisgd.bench.memory.process_memory import ProcessMemory, read_memory
from mpisgd.bench.report.rows import OURS, SHARED
from mpisgd.bench.training import LEARNING_RATE, StepTask, Training
from mpisgd.config import launcher_rank, launcher_size
from mpisgd.job.mpi_settings import set_mpi_defaults

__all__ = ["train"]

MOMENTUM = 0.9


def _alone(training: Training) -> str:
    return ""


def _with_mpi(training: Training) -> str:
    set_mpi_defaults()
    from mpisgd.transport import mpi

    mpi.start()
    mpi.MPI.COMM_WORLD.Barrier()
    return mpi.library_version()


def _with_mpisgd(training: Training, *, share_parameters: bool = False) -> str:
    mpisgd.init(num_threads=torch.get_num_threads())
    mpisgd.broadcast_parameters(training.model)
    training.optimizer = mpisgd.DistributedOptimizer(
        training.optimizer,
        named_parameters=training.model.named_parameters(),
        share_parameters=share_parameters,
    )
    from mpisgd.transport import mpi

    return mpi.library_version()


# What each does before it trains; returns the MPI library's name.
PREPARATIONS: dict[str, Callable[[Training], str]] = {
    NONE: _alone,
    STARTED: _with_mpi,
    OURS: _with_mpisgd,
    SHARED: functools.partial(_with_mpisgd, share_parameters=True),
}


class MemoryLog:
    """What a process took, at the points where that is largest."""

    def __init__(self) -> None:
        self.points: dict[str, ProcessMemory] = {}

    def add(self, point: str) -> None:
        """Record the memory of now."""
        if share := read_memory():
            self.points[point] = share


def train(run: TrainingRun, rank: int, size: int) -> dict[str, Any]:
    """Train; return what is to be known of it."""
    torch.set_num_threads(run.threads)
    log = MemoryLog()
    training = Training(StepTask(run.model, BATCHES[run.model], size, run.small), rank)
    training.optimizer = torch.optim.SGD(
        training.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM if run.momentum else 0.0
    )
    library = PREPARATIONS[run.variant](training)
    for number in range(run.steps):
        training.step(average=functools.partial(log.add, f"backward {number}"))
        log.add(f"step {number}")
    return {
        "library": library,
        "checksum": sum(float(param.detach().double().sum()) for param in training.model.parameters()),
        "points": {point: dataclasses.asdict(share) for point, share in log.points.items()},
    }


def main(folder: Path, run: TrainingRun) -> None:
    """Train, and leave what was found."""
    rank, size = launcher_rank() or 0, launcher_size() or 1
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    result = train(run, rank, size)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), TrainingRun(**json.loads(sys.argv[2])))
