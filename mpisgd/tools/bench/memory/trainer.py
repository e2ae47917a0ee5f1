"""The program whose memory is measured: `python -m mpisgd.tools.bench.memory.trainer FOLDER RUN`.

It trains for some steps, with mpisgd or without, and leaves in FOLDER `rank-R.pid` at its start and
`rank-R.json` at its end: its memory where that is largest (gradients are all there, the optimizer has made
its state), and what its parameters add up to, which tells whether the ranks did train together. Without
mpisgd it loads no MPI at all.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import mpisgd
from mpisgd.config import launcher_rank, launcher_size
from mpisgd.job.mpi_settings import set_mpi_defaults
from mpisgd.tools.bench.cases import BATCHES
from mpisgd.tools.bench.memory.peak import NONE, STARTED
from mpisgd.tools.bench.memory.process_memory import read_memory
from mpisgd.tools.bench.report.rows import OURS, SHARED
from mpisgd.tools.bench.training import StepTask, Training

__all__ = ["train"]


def train(
    rank: int, size: int, *, variant: str, model: str, small: bool, optimizer: str, steps: int, threads: int
) -> dict[str, Any]:
    """Train; return what is to be known of it.

    Args:
        rank: of this process.
        size: of the job.
        variant: one of VARIANTS.
        model: one of BATCHES.
        small: a miniature of the model.
        optimizer: see `StepTask`.
        steps: how many.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    task = StepTask(model, BATCHES[model], size, small, optimizer=optimizer)
    training = Training(task, rank)
    library = _prepare(training, variant)
    points = {}
    for number in range(steps):
        training.backward()
        points[f"backward {number}"] = read_memory()
        training.optimizer.step()
        points[f"step {number}"] = read_memory()
    return {
        "library": library,
        # Of one variant: asking takes memory, which those without mpisgd must not.
        "sharable_bytes": _sharable_bytes(training) if variant == OURS else 0,
        "checksum": sum(map(_sum, training.model.parameters())),
        "points": {point: dataclasses.asdict(share) for point, share in points.items() if share},
    }


def _sharable_bytes(training: Training) -> int:
    """Return the bytes of which ranks that share parameters have one copy together."""
    estimates = mpisgd.estimate_memory(training.model, training.optimizer, ranks=2)
    alone, shared = estimates["Synchronous()"], estimates["Synchronous(), share_parameters"]
    half = alone.parameters - shared.parameters + alone.optimizer_state - shared.optimizer_state
    return 2 * half


def _sum(param: torch.Tensor) -> float:
    """Add up in float64. Not by torch, which would make a whole float64 copy: that would be the peak."""
    return float(param.detach().numpy().sum(dtype="float64"))


def _prepare(training: Training, variant: str) -> str:
    """Do what a variant does before it trains; return the MPI library's name."""
    if variant == NONE:
        return ""
    if variant == STARTED:
        set_mpi_defaults()
    else:
        mpisgd.init(num_threads=torch.get_num_threads())
        mpisgd.broadcast_parameters(training.model)
        training.distribute(mpisgd.DistributedOptimizer, share_parameters=variant == SHARED)
    from mpisgd.transport import mpi

    if variant == STARTED:
        mpi.start()
        mpi.MPI.COMM_WORLD.Barrier()
    return mpi.library_version()


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and leave what was found."""
    rank, size = launcher_rank() or 0, launcher_size() or 1
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    result = train(rank, size, **options)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
