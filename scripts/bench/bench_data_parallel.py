"""What it costs that one rank has the batch: `mpisgd.nn.DataParallel` beside DDP and DistributedOptimizer.

    mpirun -np 2 python scripts/bench/bench_data_parallel.py --model transformer

All train on the same joined batch; with DataParallel, rank 0 has it, and the optimizer. Measured as
`python -m mpisgd bench` does: interleaved, every result checked first; read the ratios.
"""

from dataclasses import replace
from typing import Annotated

import typer
from timed_record import JsonFile, tell
from torch import nn

import mpisgd
from mpisgd.nn import DataParallel, DataParallelCriterion
from mpisgd.tools.bench.cases import BATCHES
from mpisgd.tools.bench.measure import Pace, Timed, measure
from mpisgd.tools.bench.torch_parallel import group_on_mpisgd, torch_step
from mpisgd.tools.bench.training import MODELS, StepTask, Training
from mpisgd.tools.cli.program import run_program

app = typer.Typer(add_completion=False)

DDP = "DDP"


class Rooted(Training):
    """The joined batch and the optimizer on rank 0, the module on all."""

    def __init__(self, task: StepTask, *, parallel_loss: bool) -> None:
        super().__init__(replace(task, joined=True), 0)
        self.forward = DataParallel(self.model, gather_outputs=not parallel_loss)
        self.criterion = DataParallelCriterion(nn.CrossEntropyLoss()) if parallel_loss else None

    def backward(self) -> None:
        """Leave gradients behind on rank 0."""
        self.zero_grad()
        outputs = self.forward(self.inputs)
        if self.criterion is not None:
            loss = self.criterion(outputs, self.targets)
        else:
            loss = nn.functional.cross_entropy(outputs, self.targets) if mpisgd.rank() == 0 else outputs
        loss.backward()

    def verify(self) -> None:
        """The others have the parameters of rank 0 before its step."""
        if mpisgd.rank() == 0:
            super().verify()


def variants(task: StepTask) -> list[Timed]:
    """Return what is compared."""
    ours = Training(task, mpisgd.rank())
    ours.distribute(mpisgd.DistributedOptimizer)
    gathered, parallel = Rooted(task, parallel_loss=False), Rooted(task, parallel_loss=True)
    return [
        torch_step(DDP, task),
        Timed("DistributedOptimizer", ours.step, ours, ours=True),
        Timed("DataParallel", gathered.step, gathered, ours=True),
        Timed("DataParallel, parallel loss", parallel.step, parallel, ours=True),
    ]


@app.command()
def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "transformer",
    batch: Annotated[int | None, typer.Option(min=1, help="examples of a rank")] = None,
    small: Annotated[bool, typer.Option(help="a miniature of the model")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="measured rounds")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Measure training steps with the batch on one rank against steps with its share on each."""
    mpisgd.init()
    if model not in MODELS:
        raise mpisgd.JobError(f"--model {model}: expected one of {', '.join(MODELS)}")
    task = StepTask(model, batch or BATCHES[model], mpisgd.size(), small)
    with group_on_mpisgd(True):
        seconds = measure(variants(task), Pace(repeats, repeats, 0.0, turn_s=0.5, max_calls=10)).seconds
    what = f"{model}, batch {task.batch} x {task.size}"
    tell("data_parallel", what, seconds, DDP, json_file)


if __name__ == "__main__":
    run_program(app)
