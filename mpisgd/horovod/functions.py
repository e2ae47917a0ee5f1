"""How ranks start equal, and Python objects: Horovod's `horovod.torch.functions`."""

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import as_rank, check_name, check_optimizer
from mpisgd.horovod.ops.allgather import allgather_async
from mpisgd.horovod.ops.broadcast import broadcast_, broadcast_async_
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.submission import set_id_of_member
from mpisgd.horovod.optimizer import forget_step
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.job.rank_info import rank
from mpisgd.sharding.layerwise.in_files import check_in_memory

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


# -- objects -------------------------------------------------------------------------------------------


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(memory: Tensor) -> Any:
    return pickle.loads(memory.numpy().tobytes())


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every member of a process set.

    Args:
        obj: an object that can be pickled; used on the root only.
        root_rank: a rank of the job.
        name: identifies the operation on all members; the default is the same for all types of objects, which
            may differ by rank.
        process_set: the ranks that take part.
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
    """Return the objects of all ranks, in rank order.

    Args:
        obj: an object that can be pickled.
        name, process_set: as for `broadcast_object`.
    """
    check_name("allgather_object", name)
    name = name or "object"
    memory = _pickled(obj)
    lengths = synchronize(allgather_async(torch.tensor([memory.numel()]), f"{name}.sz", process_set))
    everyones = synchronize(allgather_async(memory, f"{name}.t", process_set))
    return [_unpickled(piece) for piece in everyones.split(lengths.tolist())]


# -- models and optimizers -----------------------------------------------------------------------------


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the root's parameters to all ranks.

    Args:
        params: a state dict, or (name, tensor) pairs such as `model.named_parameters()`.
        root_rank: rank of the job that has the values.
        process_set: the ranks that take part.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: shapes or dtypes differ between ranks; names the parameter.
    """
    root_rank = as_rank("broadcast_parameters", root_rank)
    set_id_of_member("broadcast_parameters", process_set)
    pairs = sorted(params.items()) if isinstance(params, Mapping) else _pairs(params)
    tensors = [(name, value) for name, value in pairs if isinstance(value, Tensor)]
    check_in_memory("broadcast_parameters", tensors)
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
    """Copy the optimizer state of the root to all ranks: momenta, step counts, learning rates.

    An optimizer without state has zero gradients afterwards, as with Horovod.

    Args:
        optimizer: the state of the root is unchanged; elsewhere it is replaced, as by `load_state_dict`.
        root_rank: rank of the job that has the state.
        model: its `Embedding` modules show which of these gradients are sparse.
        process_set: the ranks that take part.
    """
    check_optimizer("broadcast_optimizer_state", optimizer)
    root_rank = as_rank("broadcast_optimizer_state", root_rank)
    state = optimizer.state_dict()
    received = broadcast_object(state, root_rank, "optimizer_state", process_set)
    if not state["state"]:
        _set_zero_gradients(optimizer, model)
    if rank() != root_rank:
        optimizer.load_state_dict(received)
    else:  # as the others, which have loaded it
        forget_step(optimizer)


def _set_zero_gradients(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Give what is trained a gradient of zeros, in the form in which its gradients will come."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    sparse = {id(m.weight) for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.requires_grad:
            zeros = torch.zeros_like(param, requires_grad=False)
            is_sparse = id(param) in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            param.grad = zeros.to_sparse(min(1, param.dim())) if is_sparse else zeros
