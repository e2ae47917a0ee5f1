"""A job of `./scripts/scale`: measures something on all ranks, and rank 0 prints it as a line of JSON.

python program.py torch BEGAN            imports torch, and nothing else
python program.py measure BEGAN FOLDER   start, step, operations, checkpoint, a late rank, a death
python program.py recover BEGAN FOLDER   a rank dies, and the others go on (under `mpirun --with-ft ulfm`)

BEGAN is the time at which the launcher was started, in seconds since 1970; all hosts have the same clock, as
they are one machine. Times of operations are the slowest rank's.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

REPORT = "scale: "  # what a line of results begins with
IS_LATE = "scale: the last rank is late"
STALL_WARNING_S, LATE_S = 2.0, 8.0
ROUNDS, CALLS = 5, {4: 10, 4096: 10, 2**22: 2}  # calls of a round, by bytes
STEPS, STEP_OF_LOSS = 8, 4
WIDTH = 256


def report(results: dict[str, Any]) -> None:
    """Print results, from one rank."""
    print(f"{REPORT}{json.dumps(results)}", flush=True)


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 400,000 parameters, the same on every rank, and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A step on examples of the rank."""
    inputs = torch.full((8, WIDTH), 1.0 + rank)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def measure(began: float, folder: Path) -> None:
    """Print what everything takes; the last rank is killed at the end, and with it the job."""
    import mpisgd
    from mpisgd import checkpoint

    mpisgd.init()
    from mpi4py import MPI

    comm, rank, size = MPI.COMM_WORLD, mpisgd.rank(), mpisgd.size()
    model, plain = make_training()
    optimizer = mpisgd.DistributedOptimizer(plain, model.named_parameters())
    train(model, optimizer, rank)
    found = {"start": comm.allreduce(time.time() - began, MPI.MAX)}

    def slowest(calls: Mapping[str, Callable[[], Any]], number: int) -> None:
        """Note medians of interleaved rounds, in seconds."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS + 1):
            for name, call in calls.items():
                comm.Barrier()
                start = time.perf_counter()
                for _ in range(number):
                    call()
                if turn:  # the first one warms up
                    taken[name].append((time.perf_counter() - start) / number)
        for name, times in taken.items():
            found[name] = comm.allreduce(statistics.median(times), MPI.MAX)

    local, alone = make_training()
    slowest(
        {"step": lambda: train(model, optimizer, rank), "step: alone": lambda: train(local, alone, rank)}, 2
    )
    for nbytes, number in CALLS.items():
        ours, theirs, result = (torch.ones(nbytes // 4) for _ in range(3))
        name, arrays = f"all_reduce, {nbytes} B", (theirs.numpy(), result.numpy())
        slowest(
            {name: partial(mpisgd.all_reduce, ours), f"{name}: MPI": partial(comm.Allreduce, *arrays)}, number
        )
    slowest({"barrier": mpisgd.barrier, "barrier: MPI": comm.Barrier}, CALLS[4])
    start = time.perf_counter()
    checkpoint.save(folder / "checkpoints", 1, model=model, optimizer=optimizer)
    found["checkpoint"] = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    if rank == 0:
        report(found)
        print(IS_LATE, flush=True)
    if rank == size - 1:
        time.sleep(LATE_S)
    mpisgd.barrier()
    if rank == size - 1:
        report({"killed": time.time()})
        os.kill(os.getpid(), signal.SIGKILL)
    mpisgd.barrier()


def recover(began: float, folder: Path) -> None:
    """Print how long it takes from the death of a rank to the end of the next step."""
    import mpisgd

    mpisgd.init()
    model, optimizer = make_training()
    optimizer = mpisgd.DistributedOptimizer(optimizer, model.named_parameters())
    state = mpisgd.elastic.State(model=model, optimizer=optimizer, step=0)
    death, whole = folder / "death", mpisgd.size()

    @mpisgd.elastic.run
    def training(state: Any) -> None:
        while state.step < STEPS:
            if state.step == STEP_OF_LOSS and mpisgd.size() == whole and mpisgd.rank() == whole - 1:
                death.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, mpisgd.rank())
            state.step += 1
            state.commit()
            if mpisgd.size() < whole and state.step == STEP_OF_LOSS + 1:
                taken = torch.tensor([time.time() - float(death.read_text())], dtype=torch.float64)
                mpisgd.all_reduce(taken, "max")
                if mpisgd.rank() == 0:
                    report({"recovery": taken.item(), "ranks": mpisgd.size()})

    training(state)


def main(job: str, began: float, folder: Path) -> None:
    """Run a job."""
    if job == "torch":
        folder.joinpath(f"{os.uname().nodename}-{os.getpid()}").write_text(repr(time.time() - began))
    elif job == "measure":
        measure(began, folder)
    else:
        recover(began, folder)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
