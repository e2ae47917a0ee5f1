"""How ranks start equal: one rank's parameters and optimizer state become everyone's."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import as_rank, check_optimizer
from mpisgd.horovod.broadcast import broadcast_async_
from mpisgd.horovod.handles import synchronize
from mpisgd.horovod.objects import broadcast_object
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.horovod.submission import set_joined_by_this_rank
from mpisgd.job.rank_info import rank

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the root's parameters into everyone's.

    Args:
        params: a state dict, or (name, tensor) pairs such as `model.named_parameters()`.
        root_rank: rank of the job that has the values.
        process_set: who takes part.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: shapes or dtypes differ between ranks; names the parameter.
    """
    root_rank = as_rank("broadcast_parameters", root_rank)
    set_joined_by_this_rank("broadcast_parameters", process_set)
    pairs = sorted(params.items()) if isinstance(params, Mapping) else _pairs(params)
    tensors = [(name, value) for name, value in pairs if isinstance(value, Tensor)]
    started = [
        broadcast_async_(tensor, root_rank, f"parameters.{name}", process_set) for name, tensor in tensors
    ]
    for handle in started:
        synchronize(handle)


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if not isinstance(params, Iterable) or isinstance(params, str | bytes | Tensor):
        raise ValueError(f"invalid params of type: {type(params)}")
    given = list(params)
    listed = [pair if isinstance(pair, tuple) else (str(i), pair) for i, pair in enumerate(given)]
    if any(len(pair) != 2 for pair in listed) or not all(isinstance(p, tuple | Tensor) for p in given):
        raise ValueError(f"invalid params of type: {type(params)}; expected (name, tensor) pairs")
    return listed


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give everyone the optimizer state of the root: momenta, step counts, learning rates.

    Args:
        optimizer: unchanged on the root; elsewhere its state is replaced, as by `load_state_dict`.
        root_rank: rank of the job that has the state.
        model: taken for compatibility.
        process_set: who takes part.
    """
    check_optimizer("broadcast_optimizer_state", optimizer)
    root_rank = as_rank("broadcast_optimizer_state", root_rank)
    state = optimizer.state_dict() if rank() == root_rank else None
    received = broadcast_object(state, root_rank, "optimizer_state", process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(received)
