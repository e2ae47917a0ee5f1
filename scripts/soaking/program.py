"""A job of `./scripts/soak`: does one thing very often, and rank 0 prints what all ranks hold meanwhile.

python program.py steps COUNT        of a training whose parameters, loss and batch stay small
python program.py groups COUNT       of all ranks or of some of them, made, used and closed
python program.py optimizers COUNT   with all strategies in turn, made, stepped twice and deleted
python program.py objects COUNT      of several sizes, gathered by all ranks

Each sample has the most that any rank holds of each quantity.
"""

import gc
import json
import sys
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
from fault_injection.fault_resources import resources
from torch import nn

import mpisgd
from mpisgd.job.lifecycle import current_job

REPORT = "soak: "  # what a line of results begins with
SAMPLES = 20
STRATEGIES: tuple[dict[str, object], ...] = (
    {},
    {"share_parameters": True},
    {"strategy": mpisgd.Sharded(stage=2)},
    {"strategy": mpisgd.LocalSGD(2)},
    {"strategy": mpisgd.DiLoCo(2)},
    {"strategy": mpisgd.Gossip(mpisgd.gossip.Ring())},
    {"strategy": mpisgd.ParameterServer("async")},
    {"compression": mpisgd.compress.TopK(ratio=0.1)},
    {"overlap": True},
)


def held() -> list[int]:
    """What this process holds: bytes of memory, open files, threads, mapped shared memory, groups."""
    gc.collect()
    process, of_job = psutil.Process(), resources()
    mapped = of_job["memory"] + of_job["of_mpi"]
    numbers = process.num_fds(), process.num_threads(), mapped, len(current_job().groups)
    return [process.memory_full_info().uss, *numbers]


def training(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of some 300 parameters, and its distributed optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, mpisgd.DistributedOptimizer(plain, model.named_parameters(), **options)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step on examples of the rank."""
    inputs = torch.full((4, 8), 1.0 + mpisgd.rank() + number % 7)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def steps() -> Callable[[int], None]:
    """A step of one training."""
    model, optimizer = training()
    return lambda number: step(model, optimizer, number)


def groups() -> Callable[[int], None]:
    """A group of all ranks, or of all but one: one of mpisgd's or of torch's; made, used and closed."""
    size, ones = mpisgd.size(), torch.ones(64)
    dist.init_process_group("mpisgd")

    def once(number: int) -> None:
        left_out = number % (size + 1)  # none of them, once in a while
        members = [rank for rank in range(size) if rank != left_out or size == 1]
        is_of_torch = number // (size + 1) % 2
        group = dist.new_group(members) if is_of_torch else mpisgd.new_group(members)
        if mpisgd.rank() not in members:
            return
        if is_of_torch:
            dist.all_reduce(ones.clone(), group=group)
            dist.destroy_process_group(group)
        else:
            mpisgd.all_reduce(ones.clone(), group=group)
            mpisgd.close_group(group)

    return once


def optimizers() -> Callable[[int], None]:
    """A training with the next strategy: two steps."""

    def once(number: int) -> None:
        model, optimizer = training(**STRATEGIES[number % len(STRATEGIES)])
        for each in range(2):
            step(model, optimizer, each)
        if hasattr(optimizer.synchronizer, "finish"):  # type: ignore[attr-defined]
            optimizer.synchronizer.finish()  # type: ignore[attr-defined]

    return once


def objects() -> Callable[[int], None]:
    """An object of up to a megabyte from each rank."""

    def once(number: int) -> None:
        found: list[object] = [None] * mpisgd.size()
        mpisgd.all_gather_object(found, bytes(10 ** (number % 7)))

    return once


KINDS = {"steps": steps, "groups": groups, "optimizers": optimizers, "objects": objects}


def main(kind: str, count: int) -> None:
    """Do it so often, and print the samples."""
    mpisgd.init()
    torch.set_num_threads(1)
    once = KINDS[kind]()
    every = max(1, count // SAMPLES)
    for number in range(1, count + 1):
        once(number)
        if number % every == 0:
            most = torch.tensor(held())
            mpisgd.all_reduce(most, "max")
            if mpisgd.rank() == 0:
                print(f"{REPORT}{json.dumps([number, *most.tolist()])}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
