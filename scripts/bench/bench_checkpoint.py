"""The cost of a checkpoint, compared with a training step and with plain writes of the same bytes.

    mpirun -np 2 python scripts/bench/bench_checkpoint.py --folder /scratch/me

The 22 million parameter MLP of `python -m mpisgd bench step`, trained by SGD with momentum. Each round
has steps without a checkpoint, steps while the writer's thread writes one, a blocking save, and plain writes
of the same bytes. `Preemption.agreed()` is part of every step; `State.commit()` saves the state in memory for
the loss of a rank.
"""

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from timed_record import JsonFile, tell

import mpisgd
from mpisgd import checkpoint, elastic
from mpisgd.tools.bench.training import StepTask, Training
from mpisgd.tools.cli.program import run_program

TEMPORARY = Path(tempfile.gettempdir())

app = typer.Typer(add_completion=False)
Times = dict[str, list[float]]


class Trained(Training):
    """The model, with a momentum, so that there is a state to save."""

    def __init__(self, batch: int) -> None:
        super().__init__(StepTask("mlp", batch, mpisgd.size()), mpisgd.rank())
        plain = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self.optimizer = mpisgd.DistributedOptimizer(plain, named_parameters=self.model.named_parameters())

    @property
    def state(self) -> dict[str, object]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}


def timed(times: Times, name: str, action: Callable[[], object], count: int = 1) -> None:
    """Take the time of an action on the slowest rank, per one of `count`."""
    mpisgd.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - start])
    mpisgd.all_reduce(seconds, mpisgd.ReduceOp.MAX)
    times[name].append(seconds.item() / count)


def write_plainly(path: Path, content: bytes) -> None:
    """Write to the disk, on one rank."""
    if mpisgd.rank() == 0:
        with path.open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        path.unlink()
    mpisgd.barrier()


def measure(trained: Trained, folder: Path, rounds: int, steps: int) -> tuple[Times, int]:
    """Return the times of each round, by what was timed, and the bytes of a checkpoint."""
    times: Times = defaultdict(list)
    writer = checkpoint.Writer(folder / "async", keep_last=1)
    preemption = checkpoint.on_preemption()
    kept = elastic.State(**trained.state)
    kept.commit()
    kept.commit()  # now the memory of both is there

    def train() -> None:
        for _ in range(steps):
            trained.step()

    def train_until_written() -> int:
        count = 0
        while not all_written(writer):
            trained.step()
            count += 1
        return count

    train()
    path = checkpoint.save(folder, 0, **trained.state, keep_last=1)
    num_bytes = mpisgd.broadcast_object(path.stat().st_size if mpisgd.rank() == 0 else None)
    content = os.urandom(num_bytes) if mpisgd.rank() == 0 else b""
    for number in range(1, rounds + 1):
        timed(times, "step", train, steps)
        timed(times, "State.commit()", kept.commit)
        timed(times, "save() of a Writer", lambda number=number: writer.save(number, **trained.state))
        start = time.perf_counter()
        count = train_until_written()
        times["until it is on the disk"].append(time.perf_counter() - start)
        if count:
            times["step meanwhile"].append((time.perf_counter() - start) / count)
        writer.wait()
        timed(
            times,
            "checkpoint.save()",
            lambda number=number: checkpoint.save(folder, number, **trained.state, keep_last=1),
        )
        timed(times, "plain write and fsync", lambda: write_plainly(folder / "plain", content))
        timed(times, "Preemption.agreed()", lambda: [preemption.agreed() for _ in range(100)], 100)
    return times, num_bytes


def all_written(writer: checkpoint.Writer) -> bool:
    """Whether the writer has nothing to do, as its own rank knows."""
    busy = writer.busy if mpisgd.rank() == 0 else None
    return not mpisgd.broadcast_object(busy)


@app.command()
def main(
    folder: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = TEMPORARY,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round without a checkpoint.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of a rank.")] = 64,
    json_file: JsonFile = None,
) -> None:
    """Compare saving with training."""
    mpisgd.init()
    own = tempfile.TemporaryDirectory(dir=folder) if mpisgd.rank() == 0 else None
    times, num_bytes = measure(Trained(batch), Path(mpisgd.broadcast_object(own and own.name)), rounds, steps)
    if own is not None:
        own.cleanup()
    tell("checkpoint", f"mlp with momentum, {num_bytes / 1e6:.0f} MB", times, "step", json_file)


if __name__ == "__main__":
    run_program(app)
