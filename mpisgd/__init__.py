"""mpisgd: distributed SGD with torch over MPI.

    import mpisgd

    mpisgd.init()
    model = ...
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                            named_parameters=model.named_parameters())

Importing the package starts no MPI and loads neither torch nor mpi4py: every public name is looked up on
first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpisgd.collectives.all_gather import all_gather, all_gather_into_tensor
    from mpisgd.collectives.all_reduce import all_reduce
    from mpisgd.collectives.all_to_all import all_to_all, all_to_all_single
    from mpisgd.collectives.barrier import barrier
    from mpisgd.collectives.broadcast import broadcast
    from mpisgd.collectives.coalesced import (
        all_gather_into_tensor_coalesced,
        all_reduce_coalesced,
        broadcast_coalesced,
        reduce_scatter_tensor_coalesced,
    )
    from mpisgd.collectives.gather import gather, scatter
    from mpisgd.collectives.objects import (
        all_gather_object,
        broadcast_object,
        gather_object,
        scatter_object,
    )
    from mpisgd.collectives.point_to_point import irecv, isend, recv, send
    from mpisgd.collectives.reduce import reduce
    from mpisgd.collectives.reduce_scatter import reduce_scatter, reduce_scatter_tensor
    from mpisgd.compress.cast import Compression
    from mpisgd.compress.compressor import BucketReducer, Compressor
    from mpisgd.core.dtypes import ReduceOp
    from mpisgd.core.group import Group
    from mpisgd.core.work import Work
    from mpisgd.errors import (
        AlreadyInitialized,
        CheckpointDamaged,
        CheckpointError,
        CheckpointMismatch,
        CollectiveMismatch,
        CollectiveTimeout,
        Deadlock,
        InvalidArgument,
        InvalidRank,
        JobError,
        MpiFailed,
        MpiNotFound,
        MpisgdError,
        NcclFailed,
        NonFiniteGradients,
        NotInGroup,
        NotInitialized,
        OutOfSync,
        PeerLost,
        ShapeMismatch,
        Unreachable,
        UnsupportedOp,
        UnsupportedTensor,
        UnsupportedTorch,
    )
    from mpisgd.job.groups import new_group
    from mpisgd.job.lifecycle import init, is_initialized, shutdown
    from mpisgd.job.rank_info import local_rank, local_size, node_rank, num_nodes, rank, size
    from mpisgd.nn.sync_batch_norm import SyncBatchNorm
    from mpisgd.optim.average import average_gradients
    from mpisgd.optim.broadcast import broadcast_optimizer_state, broadcast_parameters
    from mpisgd.optim.distributed import DistributedOptimizer
    from mpisgd.optim.in_sync import check_in_sync
    from mpisgd.strategies.strategy import Strategy, Synchronizer, Training
    from mpisgd.strategies.synchronous import Synchronous
    from mpisgd.timeline.session import start_timeline, stop_timeline

__version__ = "0.1.0.dev0"

# One line per module: where each public name lives. A test compares it with the imports above.
_PARTS = ("data", "elastic")  # found without an import of their own

_HOMES = {
    "mpisgd.collectives.all_gather": ("all_gather", "all_gather_into_tensor"),
    "mpisgd.collectives.all_reduce": ("all_reduce",),
    "mpisgd.collectives.all_to_all": ("all_to_all", "all_to_all_single"),
    "mpisgd.collectives.barrier": ("barrier",),
    "mpisgd.collectives.broadcast": ("broadcast",),
    "mpisgd.collectives.coalesced": (
        "all_gather_into_tensor_coalesced",
        "all_reduce_coalesced",
        "broadcast_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    "mpisgd.collectives.gather": ("gather", "scatter"),
    "mpisgd.collectives.objects": (
        "all_gather_object",
        "broadcast_object",
        "gather_object",
        "scatter_object",
    ),
    "mpisgd.collectives.point_to_point": ("irecv", "isend", "recv", "send"),
    "mpisgd.collectives.reduce": ("reduce",),
    "mpisgd.collectives.reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor"),
    "mpisgd.core.dtypes": ("ReduceOp",),
    "mpisgd.core.group": ("Group",),
    "mpisgd.job.groups": ("new_group",),
    "mpisgd.job.lifecycle": ("init", "is_initialized", "shutdown"),
    "mpisgd.job.rank_info": ("local_rank", "local_size", "node_rank", "num_nodes", "rank", "size"),
    "mpisgd.core.work": ("Work",),
    "mpisgd.compress.cast": ("Compression",),
    "mpisgd.compress.compressor": ("BucketReducer", "Compressor"),
    "mpisgd.errors": (
        "AlreadyInitialized",
        "CheckpointDamaged",
        "CheckpointError",
        "CheckpointMismatch",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "Deadlock",
        "InvalidArgument",
        "InvalidRank",
        "JobError",
        "MpiFailed",
        "MpiNotFound",
        "MpisgdError",
        "NcclFailed",
        "NonFiniteGradients",
        "NotInGroup",
        "NotInitialized",
        "OutOfSync",
        "PeerLost",
        "ShapeMismatch",
        "Unreachable",
        "UnsupportedOp",
        "UnsupportedTensor",
        "UnsupportedTorch",
    ),
    "mpisgd.nn.sync_batch_norm": ("SyncBatchNorm",),
    "mpisgd.optim.average": ("average_gradients",),
    "mpisgd.optim.broadcast": ("broadcast_optimizer_state", "broadcast_parameters"),
    "mpisgd.optim.distributed": ("DistributedOptimizer",),
    "mpisgd.optim.in_sync": ("check_in_sync",),
    "mpisgd.strategies.strategy": ("Strategy", "Synchronizer", "Training"),
    "mpisgd.strategies.synchronous": ("Synchronous",),
    "mpisgd.timeline.session": ("start_timeline", "stop_timeline"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyInitialized",
    "BucketReducer",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Compression",
    "Compressor",
    "Deadlock",
    "DistributedOptimizer",
    "Group",
    "InvalidArgument",
    "InvalidRank",
    "JobError",
    "MpiFailed",
    "MpiNotFound",
    "MpisgdError",
    "NcclFailed",
    "NonFiniteGradients",
    "NotInGroup",
    "NotInitialized",
    "OutOfSync",
    "PeerLost",
    "ReduceOp",
    "ShapeMismatch",
    "Strategy",
    "SyncBatchNorm",
    "Synchronizer",
    "Synchronous",
    "Training",
    "Unreachable",
    "UnsupportedOp",
    "UnsupportedTensor",
    "UnsupportedTorch",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_in_sync",
    "gather",
    "gather_object",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "local_rank",
    "local_size",
    "new_group",
    "node_rank",
    "num_nodes",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "scatter_object",
    "send",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """Look up a public name on first use."""
    if name in _PARTS:
        return importlib.import_module(f"mpisgd.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mpisgd' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
