"""What is counted: operations, groups, checkpoints, steps of methods, by name; each is done by all ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpisgd
from mpisgd import checkpoint, compress
from mpisgd.job.groups import close_group
from mpisgd.methods.catalogue import strategies, text_of

Acts = Mapping[str, Callable[[], Any]]

PAIRWISE = ("all_to_all, sizes",)  # each rank sends each other one a message, as MPI's own does
SMALL, LARGE = 4, 2**15  # elements: 16 bytes, and 128 KiB
WIDTH = 64
STEPS = 4


def operation_acts() -> Acts:
    """Return each operation. Those whose memory grows with the ranks move 16 bytes for each."""
    rank, size = mpisgd.rank(), mpisgd.size()
    small, large = torch.ones(SMALL), torch.ones(LARGE)
    each = [torch.ones(SMALL) for _ in range(size)]
    joined = torch.ones(SMALL * size)
    names: list[Any] = [None] * size
    sizes = [1 + (source + target) % 2 for source in (rank,) for target in range(size)]

    def everyone(tensors: list[Tensor]) -> list[Tensor] | None:
        return tensors if rank == 0 else None

    def pass_on() -> None:
        work = mpisgd.irecv(torch.empty(SMALL), (rank - 1) % size)
        mpisgd.send(small, (rank + 1) % size)
        work.wait()

    return {
        "barrier": mpisgd.barrier,
        "all_reduce, 16 B": lambda: mpisgd.all_reduce(small),
        "all_reduce, 128 KiB": lambda: mpisgd.all_reduce(large),
        "broadcast": lambda: mpisgd.broadcast(small, 0),
        "reduce": lambda: mpisgd.reduce(small, 0),
        "all_gather": lambda: mpisgd.all_gather(each, small),
        "gather": lambda: mpisgd.gather(small, everyone(each), 0),
        "scatter": lambda: mpisgd.scatter(small, everyone(each), 0),
        "reduce_scatter": lambda: mpisgd.reduce_scatter_tensor(small, joined),
        "all_to_all": lambda: mpisgd.all_to_all_single(torch.empty_like(joined), joined),
        "all_to_all, sizes": lambda: mpisgd.all_to_all_single(
            torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes
        ),
        "broadcast_object": lambda: mpisgd.broadcast_object([rank], 0),
        "all_gather_object": lambda: mpisgd.all_gather_object(names, rank),
        "gather_object": lambda: mpisgd.gather_object(rank, names if rank == 0 else None, 0),
        "send and irecv": pass_on,
    }


def group_acts() -> Acts:
    """Return the making, the first operation and the end of a group of all ranks."""
    made: list[Any] = []
    return {
        "new_group": lambda: made.append(mpisgd.new_group()),
        "first barrier of a group": lambda: mpisgd.barrier(made[0]),
        "closing a group": lambda: close_group(made[0]),
    }


def checkpoint_acts(folder: Path) -> Acts:
    """Return the saving and the loading of a model and its optimizer."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    state, saved = {"model": model, "optimizer": optimizer}, []
    return {
        "checkpoint.save": lambda: saved.append(checkpoint.save(folder, 1, **state)),
        "checkpoint.load": lambda: checkpoint.load(saved[0], **state),
    }


def method_acts(name: str, optimizer_of: Callable[[Any], Any]) -> Acts:
    """Return what a method does when it begins, and in STEPS steps after its first ones."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    made: list[Any] = []

    def begin() -> None:
        made.append(optimizer_of(model))

    def steps() -> None:
        for _ in range(STEPS):
            made[0].zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
            made[0].step()

    return {f"{name}, made": begin, f"{name}, first steps": steps, f"{name}, {STEPS} steps": steps}


def everything(names: Sequence[str], folder: Path | None = None, *, is_pairwise: bool = True) -> Acts:
    """Return all acts, with some of the methods.

    Args:
        names: of methods.
        folder: for checkpoints; None: without these.
        is_pairwise: whether each rank may send a message to each other.
    """
    known = methods()
    found = {**operation_acts(), **group_acts(), **({} if folder is None else checkpoint_acts(folder))}
    for name in names:
        found |= method_acts(name, known[name])
    return found if is_pairwise else {name: act for name, act in found.items() if name not in PAIRWISE}


def methods() -> dict[str, Callable[[Any], Any]]:
    """Return by name what makes an optimizer of a model: each example of each strategy, and some more."""
    found: dict[str, Callable[[Any], Any]] = {}
    for strategy in (example for kind in strategies() for example in kind.examples()):
        found[text_of(strategy).removeprefix("mpisgd.")] = partial(_wrapped, strategy=strategy)
    for compressor in (compress.TopK(0.01), compress.PowerSGD(2), compress.SignSGD()):
        found[text_of(compressor).removeprefix("mpisgd.compress.")] = partial(
            _wrapped, compression=compressor
        )
    found["Dion"] = lambda model: mpisgd.Dion(model.parameters(), lr=0.01)
    return found


def _wrapped(model: torch.nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return mpisgd.DistributedOptimizer(inner, **options)
