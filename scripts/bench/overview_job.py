"""One training of `bench_overview.py`, by one library: digits, with as many ranks as its job has.

Every library trains the same network from the same weights on the same batches of the whole job, each at the
speed of its defaults. The clock stands still while rank 0 evaluates the model after an epoch.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NUM_CLASSES = 10


class Parallel(NamedTuple):
    """What a library makes of a model and its optimizer; `evaluating` gives the ranks one model."""

    rank: int
    size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    barrier: Callable[[], object]
    evaluating: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def alone(model: nn.Module, settings: dict[str, Any]) -> Parallel:
    """One process with all cores."""
    return Parallel(0, 1, model, sgd(model), lambda: None)


def with_mpisgd(model: nn.Module, settings: dict[str, Any]) -> Parallel:
    """DistributedOptimizer, and `local_steps` between means of the models where there are any."""
    import mpisgd

    mpisgd.init()
    mpisgd.broadcast_parameters(model)
    steps = settings.get("local_steps")
    chosen = {"strategy": mpisgd.LocalSGD(steps)} if steps else {}
    optimizer = mpisgd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **chosen)
    evaluating = optimizer.consensus if chosen else contextlib.nullcontext
    return Parallel(mpisgd.rank(), mpisgd.size(), model, optimizer, mpisgd.barrier, evaluating)


def with_ddp(model: nn.Module, settings: dict[str, Any]) -> Parallel:
    """DDP on gloo, in the processes that mpirun has started; they meet at a file that every host sees."""
    import torch.distributed as dist

    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0" if Path("/sys/class/net/eth0").exists() else "lo")
    meeting = f"file://{settings['store']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Parallel(rank, size, wrapped, sgd(model), dist.barrier)


def with_horovod(model: nn.Module, settings: dict[str, Any]) -> Parallel:
    """Horovod over MPI."""
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return Parallel(hvd.rank(), hvd.size(), model, optimizer, lambda: hvd.allreduce(torch.zeros(1)))


LIBRARIES: dict[str, Callable[[nn.Module, dict[str, Any]], Parallel]] = {
    "one process": alone,
    "mpisgd": with_mpisgd,
    "mpisgd, LocalSGD(8)": lambda model, settings: with_mpisgd(model, {**settings, "local_steps": 8}),
    "DDP on gloo": with_ddp,
    "Horovod": with_horovod,
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def network(width: int) -> nn.Module:
    """Two hidden layers."""
    hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [n, 64] from 0 to 1 and labels [n], those to train with and those to test with."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images).float()[order] / 16
    y = torch.from_numpy(labels)[order]
    cut = len(y) // 5
    return x[cut:], y[cut:], x[:cut], y[:cut]


def batches(count: int, batch: int, seed: int, together: Parallel) -> Iterator[Tensor]:
    """The places of this rank's examples in each batch of the whole job."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for start in range(0, count - batch + 1, batch):
        yield order[start + together.rank : start + batch : together.size]


def train(library: str, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds of training and test accuracy after each epoch; the first epoch's seconds include a warm-up."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    x, y, test_x, test_y = digits()
    model = network(settings["width"])
    together = LIBRARIES[library](model, settings)
    curve, seconds = [], 0.0
    for epoch in range(settings["epochs"]):
        together.barrier()
        start = time.perf_counter()
        for mine in batches(len(y), settings["batch"], 1000 * settings["seed"] + epoch, together):
            together.optimizer.zero_grad()
            nn.functional.cross_entropy(together.model(x[mine]), y[mine]).backward()
            together.optimizer.step()
        together.barrier()
        seconds += time.perf_counter() - start
        with torch.no_grad(), together.evaluating():
            curve.append((seconds, float((model(test_x).argmax(1) == test_y).double().mean())))
    if together.rank == 0:
        print(json.dumps({"host": socket.gethostname(), "ranks": together.size, "curve": curve}), flush=True)
    return curve


if __name__ == "__main__":
    train(sys.argv[1], json.loads(sys.argv[2]))
    if sys.argv[1] == "DDP on gloo":
        torch.distributed.destroy_process_group()
