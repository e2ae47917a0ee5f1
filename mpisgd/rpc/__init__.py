"""`mpisgd.rpc`: torch's RPC over MPI: call functions of other ranks, hold objects there, train across ranks.

    from mpisgd import rpc

    rpc.init_rpc()  # no address; the workers are worker0, worker1, ...
    rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))  # runs on rank 1
    rpc.shutdown()                                          # or the end of the program

The names are those of `torch.distributed.rpc`, with its `dist_autograd`, and the optimizer of
`torch.distributed.optim` that goes with it. A program written for torch's RPC changes its import and drops
its address. Needs a torch with RPC, as the wheels for Linux have it.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from mpisgd.rpc.calls import Future, get_worker_info, remote, rpc_async, rpc_sync
from mpisgd.rpc.lifecycle import init_rpc, shutdown
from mpisgd.rpc.tensorpipe import available

if TYPE_CHECKING:
    from torch._C._distributed_rpc import WorkerInfo
    from torch.distributed import autograd as dist_autograd
    from torch.distributed.optim import DistributedOptimizer
    from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions, functions

__all__ = [
    "DistributedOptimizer",
    "Future",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "dist_autograd",
    "functions",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

# torch's own: the module, and the name in it; "" for the module itself.
_TORCH = {
    "DistributedOptimizer": ("torch.distributed.optim", "DistributedOptimizer"),
    "RRef": ("torch.distributed.rpc", "RRef"),
    "TensorPipeRpcBackendOptions": ("torch.distributed.rpc", "TensorPipeRpcBackendOptions"),
    "WorkerInfo": ("torch.distributed.rpc", "WorkerInfo"),
    "dist_autograd": ("torch.distributed.autograd", ""),
    "functions": ("torch.distributed.rpc.functions", ""),
}


def __getattr__(name: str) -> Any:
    """Look up one of torch's own names on first use; raises UnsupportedTorch where this torch has no RPC."""
    if name not in _TORCH:
        raise AttributeError(f"module 'mpisgd.rpc' has no attribute {name!r}")
    available()
    module, attribute = _TORCH[name]
    with warnings.catch_warnings():  # torch.distributed.optim uses what torch calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        home = importlib.import_module(module)
    return getattr(home, attribute) if attribute else home
