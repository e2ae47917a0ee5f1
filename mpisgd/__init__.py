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
    from mpisgd.comm.collectives.all_gather import all_gather, all_gather_into_tensor
    from mpisgd.comm.collectives.all_reduce import all_reduce
    from mpisgd.comm.collectives.all_to_all import all_to_all, all_to_all_single
    from mpisgd.comm.collectives.barrier import barrier
    from mpisgd.comm.collectives.broadcast import broadcast
    from mpisgd.comm.collectives.coalesced import (
        all_gather_into_tensor_coalesced,
        all_reduce_coalesced,
        broadcast_coalesced,
        reduce_scatter_tensor_coalesced,
    )
    from mpisgd.comm.collectives.gather import gather, scatter
    from mpisgd.comm.collectives.objects import (
        all_gather_object,
        broadcast_object,
        gather_object,
        scatter_object,
    )
    from mpisgd.comm.collectives.point_to_point import irecv, isend, recv, send
    from mpisgd.comm.collectives.reduce import reduce
    from mpisgd.comm.collectives.reduce_scatter import reduce_scatter, reduce_scatter_tensor
    from mpisgd.comm.dtypes import ReduceOp
    from mpisgd.comm.group import Group
    from mpisgd.comm.groups import new_group
    from mpisgd.comm.job import init, is_initialized, shutdown
    from mpisgd.comm.place import local_rank, local_size, node_rank, num_nodes, rank, size
    from mpisgd.comm.work import Work
    from mpisgd.compress.cast import Compression
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
    from mpisgd.nn.sync_batch_norm import SyncBatchNorm
    from mpisgd.optim.average import average_gradients
    from mpisgd.optim.broadcast import broadcast_optimizer_state, broadcast_parameters
    from mpisgd.optim.distributed import DistributedOptimizer
    from mpisgd.optim.in_sync import check_in_sync
    from mpisgd.timeline.session import start_timeline, stop_timeline

__version__ = "0.1.0.dev0"

# One line per module: where each public name lives. A test compares it with the imports above.
_PARTS = ("data", "elastic")  # found without an import of their own

_HOMES = {
    "mpisgd.comm.collectives.all_gather": ("all_gather", "all_gather_into_tensor"),
    "mpisgd.comm.collectives.all_reduce": ("all_reduce",),
    "mpisgd.comm.collectives.all_to_all": ("all_to_all", "all_to_all_single"),
    "mpisgd.comm.collectives.barrier": ("barrier",),
    "mpisgd.comm.collectives.broadcast": ("broadcast",),
    "mpisgd.comm.collectives.coalesced": (
        "all_gather_into_tensor_coalesced",
        "all_reduce_coalesced",
        "broadcast_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    "mpisgd.comm.collectives.gather": ("gather", "scatter"),
    "mpisgd.comm.collectives.objects": (
        "all_gather_object",
        "broadcast_object",
        "gather_object",
        "scatter_object",
    ),
    "mpisgd.comm.collectives.point_to_point": ("irecv", "isend", "recv", "send"),
    "mpisgd.comm.collectives.reduce": ("reduce",),
    "mpisgd.comm.collectives.reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor"),
    "mpisgd.comm.dtypes": ("ReduceOp",),
    "mpisgd.comm.group": ("Group",),
    "mpisgd.comm.groups": ("new_group",),
    "mpisgd.comm.job": ("init", "is_initialized", "shutdown"),
    "mpisgd.comm.place": ("local_rank", "local_size", "node_rank", "num_nodes", "rank", "size"),
    "mpisgd.comm.work": ("Work",),
    "mpisgd.compress.cast": ("Compression",),
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
    "mpisgd.timeline.session": ("start_timeline", "stop_timeline"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyInitialized",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Compression",
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
    "SyncBatchNorm",
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
