"""All-reduces of 4 bytes and 4 KiB: MPI's, ours, and the least that Python needs for one.

    python scripts/bench/bench_small.py --ranks 2 --ranks 4 --ranks 8 --json runs/small.json

The least: each rank writes its elements and the number of its call into shared memory, waits until all have
written theirs, and adds them up. Nothing is checked, nobody is told of a rank that does not come, nothing is
recorded, and the memory is the array's own. What is faster than this is not written in Python. Rounds of all
three are interleaved; a round is the mean of its calls on the slowest rank, a figure the median of rounds.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

app = typer.Typer(add_completion=False)

SIZES = {"4 B": 1, "4 KiB": 1024}  # elements of float32
ROUNDS, ROUND_S = 25, 0.02
LIMIT_S = 300
COLUMNS = ["ranks", "bytes", "MPI, us", "least in Python, us", "mpisgd, us", "least / MPI", "mpisgd / MPI"]
COLUMNS += ["mpisgd / least"]


class Least:
    """An all-reduce of float32 in shared memory, and nothing else.

    Args:
        comm: the ranks, of one host.
        path: of a new file.
        numel: of each rank's message.
    """

    def __init__(self, comm: Any, path: Path, numel: int) -> None:
        size, self._rank, self._number = comm.size, comm.rank, 0
        nbytes = 64 * size + 2 * 4 * numel * size
        if self._rank == 0:
            path.write_bytes(bytes(nbytes))
        comm.Barrier()
        memory = np.memmap(path, dtype=np.uint8, mode="r+", shape=(nbytes,))
        self._calls = memoryview(memory[: 64 * size]).cast("Q")  # one of each rank, in a line of its own
        self._others = [8 * rank for rank in range(size) if rank != self._rank]
        halves = memory[64 * size :].view(np.float32).reshape(2, size, numel)
        self._mine = [half[self._rank] for half in halves]
        self._sums = [partial(np.add.reduce, half, axis=0) for half in halves]

    def __call__(self, values: np.ndarray) -> None:
        """Add up `values` of all ranks, in place."""
        self._number = number = self._number + 1
        calls, turn = self._calls, number & 1
        self._mine[turn][:] = values
        calls[8 * self._rank] = number
        for place in self._others:
            while calls[place] < number:
                os.sched_yield()
        self._sums[turn](out=values)


def measure_here(folder: Path) -> None:
    """Print what each takes on the ranks of this job, in seconds."""
    import torch

    import mpisgd

    mpisgd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found: dict[str, list[float]] = {}
    for name, numel in SIZES.items():
        ours, theirs, plain = (torch.ones(numel) for _ in range(3))
        least = Least(comm, folder / name.replace(" ", ""), numel)
        calls: dict[str, Callable[[], Any]] = {
            "MPI": partial(comm.Allreduce, MPI.IN_PLACE, theirs.numpy()),
            "least": partial(least, plain.numpy()),
            "mpisgd": partial(mpisgd.all_reduce, ours),
        }
        for call in calls.values():
            call()
        for tensor in (ours, theirs, plain):
            assert tensor.eq(comm.size).all(), "a sum is wrong"
            tensor.zero_()  # sums of ones would overflow
        found[name] = list(rounds(comm, calls).values())
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def rounds(comm: Any, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median of each call's rounds, in seconds."""
    from mpi4py import MPI

    number, taken = dict.fromkeys(calls, 10), {name: list[float]() for name in calls}
    for turn in range(ROUNDS + 2):  # the first two find out how many calls a round has
        for name, call in calls.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(number[name]):
                call()
            mean = comm.allreduce((time.perf_counter() - start) / number[name], MPI.MAX)
            if turn < 2:
                number[name] = max(10, int(ROUND_S / mean))
            else:
                taken[name].append(mean)
    return {name: statistics.median(times) for name, times in taken.items()}


def rows_of(ranks: int, found: dict[str, list[float]]) -> list[list[str]]:
    """Return the cells of a job."""
    rows = []
    for name, (mpi, least, ours) in found.items():
        times = [f"{1e6 * value:.1f}" for value in (mpi, least, ours)]
        ratios = [f"{value:.2f}" for value in (least / mpi, ours / mpi, ours / least)]
        rows.append([str(ranks), name, *times, *ratios])
    return rows


@app.command()
def main(
    ranks: Annotated[list[int] | None, typer.Option(help="numbers of ranks; default: 2, 4, 8 and 16")] = None,
    launcher: Annotated[str, typer.Option(help="mpirun and its options")] = "",
    to: Annotated[Path | None, typer.Option("--json", help="a file for the record")] = None,
    here: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure in a job for each number of ranks, and print a table."""
    if here is not None:
        measure_here(here)
        return
    from mpisgd.errors import JobError
    from mpisgd.tools.bench.jobs import job_environment, mpirun
    from mpisgd.tools.cli.record import Output

    output = Output(to)  # raises now rather than after minutes
    rows = []
    for number in ranks or (2, 4, 8, 16):
        with tempfile.TemporaryDirectory(prefix="mpisgd-small-", dir="/dev/shm") as folder:
            command = [*mpirun(launcher), "-n", str(number), sys.executable, __file__, "--here", folder]
            env = job_environment(number)
            try:
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
            except subprocess.TimeoutExpired as exc:
                raise JobError(f"{number} ranks: not at their end after {LIMIT_S} s") from exc
            if done.returncode:
                raise JobError(f"{number} ranks: exit code {done.returncode}")
        rows += rows_of(number, json.loads(done.stdout.splitlines()[-1]))
    notes = ["the least in Python checks nothing, and waits for ever for a rank that does not come"]
    output.put_cells(COLUMNS, rows, notes)


if __name__ == "__main__":
    from mpisgd.tools.cli.program import run_program

    run_program(app)
