"""What tensor fusion buys: 604 small gradients in a few messages, against one call for each.

    mpirun -np 2 python scripts/bench_fusion.py --json fusion.json

All variants run interleaved in the same processes, so a busy machine slows all of them alike: read the
ratios.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import mpisgd
from mpisgd.cli.program import run_program

app = typer.Typer(add_completion=False)

Variant = Callable[[], None]


class Gradients:
    """The same gradients for every variant: `num` tensors, in turn a matrix and its bias."""

    def __init__(self, num: int, width: int) -> None:
        shapes = [(width, width) if i % 2 == 0 else (width,) for i in range(num)]
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.values = [torch.full(shape, float(mpisgd.rank() + i)) for i, shape in enumerate(shapes)]
        self.nbytes = sum(value.nbytes for value in self.values)

    def put(self) -> None:
        """Leave fresh gradients behind, as backward does."""
        for param, value in zip(self.params, self.values, strict=True):
            param.grad = value.clone()

    def check(self) -> None:
        """Raise unless every gradient is the mean over the ranks."""
        mean = (mpisgd.size() - 1) / 2
        for i, param in enumerate(self.params):
            if param.grad is None or not torch.allclose(param.grad, torch.full_like(param, mean + i)):
                raise mpisgd.JobError(f"gradient {i} is not the mean over the ranks")


def variants(gradients: Gradients) -> dict[str, Variant]:
    """Return what is compared; each averages all gradients over the ranks."""
    model = torch.nn.Module()
    model.params = torch.nn.ParameterList(gradients.params)
    comm = mpi_world()

    def by_hand() -> None:
        for param in gradients.params:
            comm.Allreduce(mpi_in_place(), param.grad)
            param.grad /= mpisgd.size()

    def one_call_each() -> None:
        for param in gradients.params:
            mpisgd.all_reduce(param.grad, mpisgd.ReduceOp.AVG)

    return {
        "mpisgd, fused": lambda: mpisgd.average_gradients(model),
        "mpisgd.all_reduce, one call each": one_call_each,
        "comm.Allreduce, one call each": by_hand,
    }


def mpi_world() -> Any:
    """Return mpi4py's world, which mpisgd.init() has started."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def mpi_in_place() -> Any:
    """Return MPI.IN_PLACE."""
    from mpi4py import MPI

    return MPI.IN_PLACE


def measure(gradients: Gradients, repeats: int) -> dict[str, list[float]]:
    """Return the seconds that each variant took, interleaved; the first round is not counted."""
    compared = variants(gradients)
    source = torch.cat([value.view(-1) for value in gradients.values])
    target = torch.empty_like(source)
    seconds: dict[str, list[float]] = {name: [] for name in ["one memcpy of all bytes", *compared]}
    for round_ in range(repeats + 1):
        taken = {"one memcpy of all bytes": timed(lambda: target.copy_(source))}
        for name, variant in compared.items():
            gradients.put()
            taken[name] = timed(variant)
            if round_ == 0:
                gradients.check()
        if round_:
            for name, value in taken.items():
                seconds[name].append(value)
    return seconds


def timed(action: Callable[[], Any]) -> float:
    """Return how long `action` took on the slowest rank, all starting together."""
    mpisgd.barrier()
    started = time.perf_counter()
    action()
    slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    mpisgd.all_reduce(slowest, mpisgd.ReduceOp.MAX)
    return float(slowest)


def report(seconds: dict[str, list[float]], gradients: Gradients) -> dict[str, Any]:
    """Return the result as data, with what one must know to repeat it."""
    fused = statistics.median(seconds["mpisgd, fused"])
    return {
        "command": " ".join(sys.argv),
        "ranks": mpisgd.size(),
        "hosts": mpisgd.num_nodes(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tensors": len(gradients.params),
        "bytes": gradients.nbytes,
        "rows": [
            {
                "variant": name,
                "median_ms": statistics.median(values) * 1e3,
                "min_ms": min(values) * 1e3,
                "max_ms": max(values) * 1e3,
                "ratio_to_fused": statistics.median(values) / fused,
            }
            for name, values in seconds.items()
        ],
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    title = (
        f"{result['tensors']} gradients, {result['bytes'] / 2**20:.1f} MiB, {result['ranks']} ranks on "
        f"{result['hosts']} host(s), torch {result['torch']}"
    )
    table = Table("variant", title=title)
    for column in ("median ms", "min", "max", "x fused"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        numbers = (row["median_ms"], row["min_ms"], row["max_ms"], row["ratio_to_fused"])
        table.add_row(row["variant"], *(f"{number:.2f}" for number in numbers))
    Console().print(table)


@app.command()
def main(
    tensors: Annotated[int, typer.Option(min=1, help="number of gradients")] = 604,
    width: Annotated[int, typer.Option(min=1, help="every other one is width x width")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="rounds that count")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Measure fused against unfused averaging of many small gradients."""
    mpisgd.init()
    gradients = Gradients(tensors, width)
    result = report(measure(gradients, repeats), gradients)
    if mpisgd.rank() == 0:
        show(result)
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_program(app)
