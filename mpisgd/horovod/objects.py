"""Python objects, pickled: from one rank to all, or from all to all."""

import pickle
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.allgather import allgather_async
from mpisgd.horovod.arguments import as_rank, check_name
from mpisgd.horovod.broadcast import broadcast_
from mpisgd.horovod.handles import synchronize
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.job.rank_info import rank

__all__ = ["allgather_object", "broadcast_object"]


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(memory: Tensor) -> Any:
    return pickle.loads(memory.numpy().tobytes())


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every member of a process set.

    Args:
        obj: anything that pickles; looked at on the root only.
        root_rank: rank of the job.
        name: under which the members' calls find each other; the default is the same for all objects, whose
            type may differ by rank.
        process_set: who takes part.
    """
    check_name("broadcast_object", name)
    root_rank = as_rank("broadcast_object", root_rank)
    name = name or "object"
    memory = _pickled(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([memory.numel()]), root_rank, f"{name}.sz", process_set)
    if rank() != root_rank:
        memory = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(memory, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else _unpickled(memory)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return everyone's object, in order of rank.

    Args:
        obj: anything that pickles.
        name: under which the members' calls find each other; the default is the same for all objects, whose
            type may differ by rank.
        process_set: who takes part.
    """
    check_name("allgather_object", name)
    name = name or "object"
    memory = _pickled(obj)
    lengths = synchronize(allgather_async(torch.tensor([memory.numel()]), f"{name}.sz", process_set))
    everyones = synchronize(allgather_async(memory, f"{name}.t", process_set))
    return [_unpickled(piece) for piece in everyones.split(lengths.tolist())]
