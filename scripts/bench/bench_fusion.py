"""The gain of tensor fusion: 604 small gradients in a few messages, against one call for each.

    mpirun -np 2 python scripts/bench/bench_fusion.py --json fusion.json

Only the averaging is timed; `python -m mpisgd bench step --models deep` times whole training steps of as many
gradients. Measured as that does: interleaved, every result checked first; read the ratios.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from timed_record import JsonFile, tell

import mpisgd
from mpisgd.tools.bench.measure import Pace, Subject, Timed, WrongResult, measure
from mpisgd.tools.cli.program import run_program

app = typer.Typer(add_completion=False)

FUSED = "mpisgd, fused"


class Gradients(Subject):
    """The same gradients for every variant: `num` tensors, in turn a matrix and its bias."""

    def __init__(self, num: int, width: int) -> None:
        shapes = [(width, width) if i % 2 == 0 else (width,) for i in range(num)]
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.values = [torch.full(shape, float(mpisgd.rank() + i)) for i, shape in enumerate(shapes)]
        self.model = torch.nn.Module()
        self.model.params = torch.nn.ParameterList(self.params)

    def reset(self) -> None:
        """Leave fresh gradients behind, as backward does."""
        for param, value in zip(self.params, self.values, strict=True):
            param.grad = value.clone()

    def verify(self) -> None:
        """Raise unless every gradient is the mean over the ranks."""
        mean = (mpisgd.size() - 1) / 2
        for i, param in enumerate(self.params):
            if param.grad is None or not torch.allclose(param.grad, torch.full_like(param, mean + i)):
                raise WrongResult(f"gradient {i} is not the mean over the ranks")


def by_hand(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return what people write who have mpi4py only."""
    from mpi4py import MPI  # which mpisgd.init() has started, with its own settings

    def average() -> None:
        for param in params:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, param.grad)
            param.grad /= mpisgd.size()

    return average


def one_call_each(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return the same with mpisgd's own all-reduce."""

    def average() -> None:
        for param in params:
            mpisgd.all_reduce(param.grad, mpisgd.ReduceOp.AVG)

    return average


def memcpy(gradients: Gradients) -> Callable[[], None]:
    """Return a copy of all bytes."""
    source = torch.cat([value.view(-1) for value in gradients.values])
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def variants(gradients: Gradients) -> list[Timed]:
    """Return what is compared."""
    calls = {
        FUSED: lambda: mpisgd.average_gradients(gradients.model),
        "mpisgd.all_reduce, one call each": one_call_each(gradients.params),
        "comm.Allreduce, one call each": by_hand(gradients.params),
    }
    averages = [Timed(name, call, gradients, ours=True) for name, call in calls.items()]
    return [*averages, Timed("one memcpy of all bytes", memcpy(gradients))]


@app.command()
def main(
    tensors: Annotated[int, typer.Option(min=1, help="number of gradients")] = 604,
    width: Annotated[int, typer.Option(min=1, help="size of the matrices")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="measured rounds")] = 30,
    json_file: JsonFile = None,
) -> None:
    """Measure fused against unfused averaging of many small gradients."""
    mpisgd.init()
    gradients = Gradients(tensors, width)
    # One call in each turn, since every call wants fresh gradients.
    seconds = measure(variants(gradients), Pace(repeats, repeats, 0.0, turn_s=0.0, max_calls=1)).seconds
    nbytes = sum(value.nbytes for value in gradients.values)
    what = f"{tensors} gradients, {nbytes / 2**20:.1f} MiB"
    tell("fusion", what, seconds, FUSED, json_file)


if __name__ == "__main__":
    run_program(app)
