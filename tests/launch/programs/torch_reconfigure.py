"""A default group that `reconfigure` gives its members; one of them is killed, and the others go on.

mpirun --with-ft ulfm -n 4 python torch_reconfigure.py KILLED
"""

import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import mpisgd
from mpisgd.errors import NotInitialized, PeerLost

killed = int(sys.argv[1])


def reconfigure(uuid: int, handles: list[str], group: dist.ProcessGroup | None = None) -> None:
    assert dist._reconfigure(uuid, handles, group, timeout=timedelta(seconds=60)).wait()


def total(group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(mine := torch.tensor([dist.get_rank() + 1.0]), group=group)
    return mine.item()


def gradient_of_members() -> float:
    """Every member gives its rank + 1; the mean of these by DDP."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return model.module.weight.grad.item()


dist.init_process_group("mpisgd", enable_reconfigure=True)
mpi_rank, size = mpisgd.rank(), mpisgd.size()
seen = {"mpi_rank": mpi_rank, "before": [dist.get_rank(), dist.get_world_size()]}
try:
    total()
except NotInitialized as exc:
    seen["refused"] = "reconfigure first" in str(exc)

store = distributed_c10d._get_default_store()
store.set(f"handle{mpi_rank}", dist._get_reconfigure_handle())
handles = [store.get(f"handle{rank}").decode() for rank in range(size)]
reconfigure(1, handles)
side = dist.new_group()
seen["all"] = [dist.get_rank(), dist.get_world_size(), total(), total(side)]

if mpi_rank == killed:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        total()
except PeerLost:
    pass

left = [handle for rank, handle in enumerate(handles) if rank != killed]
reconfigure(2, left)
seen["left"] = [dist.get_rank(), dist.get_world_size(), total(), gradient_of_members()]
reconfigure(3, left[::-1], side)
seen["side"] = [side.rank(), side.size(), total(side)]
try:
    reconfigure(4, handles)
except ValueError as exc:
    seen["lost"] = "one that was lost" in str(exc)
print(json.dumps(seen), flush=True)
dist.destroy_process_group()
