"""Horovod's torch API on mpisgd: `import mpisgd.horovod as hvd` in place of `import horovod.torch as hvd`."""

# ruff: noqa: F403, F405  # the names are those of `__all__`

import importlib
from typing import TYPE_CHECKING, Any

from mpisgd.horovod import elastic, mpi_ops
from mpisgd.horovod.compression import Compression
from mpisgd.horovod.exceptions import *
from mpisgd.horovod.functions import *
from mpisgd.horovod.mpi_ops import *
from mpisgd.horovod.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from mpisgd.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """Load a name on first use whose module loads torch's compiler, which takes as long as torch."""
    if name != "SyncBatchNorm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("mpisgd.horovod.sync_batch_norm").SyncBatchNorm
