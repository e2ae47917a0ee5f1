"""The same for `mpisgd.horovod`, whose arguments have Horovod's names."""

from __future__ import annotations

import math
from typing import Any

import junk
import torch
from junk import Predicate, either, flag, nothing, positive_int, writable
from public_calls import NUMEL, Call, dense_list, model, ones, optimizer, some_path

import mpisgd
import mpisgd.horovod as hvd

# What an argument of this name takes, unless the function has more to say.
USUAL: dict[str, Predicate] = {
    "tensor": junk.dense,
    "tensors": dense_list,
    "average": either(nothing, flag),
    "name": either(nothing, lambda value: isinstance(value, str)),
    "compression": lambda value: False,
    "op": either(nothing, lambda value: isinstance(value, int) and 0 <= value <= 5),
    "prescale_factor": lambda value: number(value),
    "postscale_factor": lambda value: number(value),
    "process_set": lambda value: False,
    "root_rank": lambda value: junk.rank_of(mpisgd.size())(value),
    "obj": junk.anything,
    "splits": lambda value: value is None or counts(value),
    "mark_cycles": flag,
}


def number(value: Any) -> bool:
    """Whether it can be multiplied with, as numpy's numbers and tensors of one element can."""
    try:
        return not isinstance(value, (str, bytes)) and isinstance(float(value), float)
    except (TypeError, ValueError, OverflowError, RuntimeError, NotImplementedError):
        return False


def counts(value: Any) -> bool:
    """Whether it says how many rows each rank gets."""
    listed = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() == 1)
    return listed and len(value) == mpisgd.size() and all(map(junk.natural, list_of(value)))


def list_of(value: Any) -> list[Any]:
    return value.tolist() if isinstance(value, torch.Tensor) and junk.dense(value) else list(value)


def said_as() -> dict[str, str]:
    """An average and an op are one thing, said in two ways."""
    return {"average": "op", "root_rank": "root", "params": "broadcast: tensor"}


def line(function: Any, good: Any, **takes: Predicate) -> Call:
    return Call(function, good, {**USUAL, **takes}, said_as())


def written(name: str) -> Predicate:
    """What is reduced in place must be a tensor that can be written to."""
    return writable if name.endswith("_") else junk.dense


def a_tensor() -> dict[str, Any]:
    return {"tensor": ones()}


def a_list() -> dict[str, Any]:
    return {"tensors": [ones()]}


def from_root() -> dict[str, Any]:
    return {"tensor": ones(), "root_rank": 0}


def rows() -> dict[str, Any]:
    return {"tensor": torch.ones(mpisgd.size() * NUMEL)}


CALLS: dict[str, Call] = {
    **{
        f"hvd.{name}": line(getattr(hvd, name), a_tensor, tensor=written(name))
        for name in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_")
    },
    **{f"hvd.{name}": line(getattr(hvd, name), a_tensor) for name in ("allgather", "allgather_async")},
    **{
        f"hvd.{name}": line(getattr(hvd, name), a_list) for name in hvd.__all__ if name.startswith("grouped_")
    },
    **{
        f"hvd.{name}": line(getattr(hvd, name), from_root, tensor=written(name))
        for name in ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_")
    },
    **{
        f"hvd.{name}": line(getattr(hvd, name), rows)
        for name in ("alltoall", "alltoall_async", "reducescatter", "reducescatter_async")
    },
    "hvd.barrier": line(hvd.barrier, dict),
    "hvd.allgather_object": line(hvd.allgather_object, lambda: {"obj": 1}),
    "hvd.broadcast_object": line(hvd.broadcast_object, lambda: {"obj": 1}),
    "hvd.broadcast_parameters": line(
        hvd.broadcast_parameters,
        lambda: {"params": model().state_dict(), "root_rank": 0},
        params=lambda value: isinstance(value, dict) or repr(value) in ("[]", "set()") or dense_list(value),
    ),
    "hvd.broadcast_optimizer_state": line(
        hvd.broadcast_optimizer_state,
        lambda: {"optimizer": optimizer(), "root_rank": 0},
        optimizer=lambda value: False,
        model=junk.anything,
    ),
    "hvd.DistributedOptimizer": line(
        hvd.DistributedOptimizer,
        lambda: {"optimizer": optimizer()},
        optimizer=lambda value: False,
        named_parameters=nothing,
        backward_passes_per_step=positive_int,
        gradient_predivide_factor=lambda value: isinstance(value, (int, float)) and 0 < value < math.inf,
        num_groups=lambda value: isinstance(value, int) and value >= 0,
        groups=either(nothing, lambda value: repr(value) in ("[]", "''") or junk.natural(value)),
        sparse_as_dense=flag,
        keep_none=flag,
    ),
    "hvd.SyncBatchNorm": line(
        hvd.SyncBatchNorm,
        lambda: {"num_features": 3},
        num_features=lambda value: isinstance(value, int) and 0 <= value < 10**7,
        eps=lambda value: isinstance(value, (int, float)) and value >= 0,
        momentum=either(nothing, lambda value: isinstance(value, (int, float))),
        affine=flag,
        track_running_stats=flag,
        device=junk.anything,
        dtype=junk.anything,
        bias=flag,
    ),
    "hvd.sparse_allreduce_async": line(
        hvd.sparse_allreduce_async,
        lambda: {"tensor": ones().to_sparse(), "name": "sparse", "op": hvd.Sum},
        tensor=lambda value: isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo,
    ),
    "hvd.poll": line(hvd.poll, lambda: {"handle": 10**6}, handle=lambda value: False),
    "hvd.synchronize": line(
        hvd.synchronize, lambda: {"handle": 10**6}, handle=either(junk.integer, callable)
    ),
    "hvd.start_timeline": line(
        hvd.start_timeline, lambda: {"file_path": str(some_path())}, file_path=junk.text
    ),
    "hvd.init": line(hvd.init, dict, comm=junk.anything, process_sets=junk.anything),  # it has begun
    "hvd.ProcessSet": line(
        hvd.ProcessSet, lambda: {"ranks_or_comm": [0]}, ranks_or_comm=lambda value: repr(value) == "[]"
    ),
}
NOT_CALLED = {
    "Compression": "a choice of constants",
    "add_process_set": "see ProcessSet",
    "remove_process_set": "see ProcessSet",
    "join": "waits for the other ranks, whatever its argument",
}
WITHOUT_ARGUMENTS = {
    name
    for name in hvd.__all__
    if name.endswith(("_built", "_enabled", "_supported", "rank", "size"))
    or name in ("is_homogeneous", "is_initialized", "shutdown", "stop_timeline")
}
