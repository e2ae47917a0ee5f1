"""`init_rpc` and `shutdown`: the one worker that this process may be at a time."""

import itertools
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from mpisgd.core.consistency import Operation
from mpisgd.job.lifecycle import current_job
from mpisgd.job.world import Job
from mpisgd.rpc.agreement import Request, agree
from mpisgd.rpc.worker import Worker
from mpisgd.transport.tcp_store.network_store import NetworkStore
from mpisgd.transport.tcp_store.store import open_store

__all__ = ["init_rpc", "shutdown"]


class _JobStore(NamedTuple):
    """The store of a job's starts of RPC, and their numbers."""

    job: Job
    store: Store
    numbers: "itertools.count[int]"


_worker: Worker | None = None
_job_store: _JobStore | None = None


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this rank a worker, so that all ranks can call functions on each other. Collective over the job.

    Works like `torch.distributed.rpc.init_rpc`, without an address: the ranks find each other by MPI. On one
    host RPC listens on the loopback interface only, between hosts on the interface towards rank 0. When this
    returns, all ranks are connected, and no other process can connect. RPC ends with `shutdown()`, or with
    the job.

    Args:
        name: the name of this worker, different on each rank; default `worker{rank}`.
        backend: BackendType.TENSORPIPE of torch; None means the same.
        rank: this process's rank; -1 means the same.
        world_size: the number of ranks of the job; None means the same.
        rpc_backend_options: a `TensorPipeRpcBackendOptions` for `num_worker_threads`, `rpc_timeout` (default:
            the job's timeout), `device_maps` and `devices`; its address is not used.

    Raises:
        UnsupportedTorch: this torch was built without RPC.
        AlreadyInitialized: RPC runs already.
        InvalidArgument: an invalid name or one that another rank has, or a rank or size that is not that of
            the job.
        Unreachable: the ranks cannot connect. All of these errors are raised on every rank.

    Cost: connects every rank with every rank; 8 file descriptors for each.
    """
    global _worker
    job = current_job()
    if _worker is not None and _worker.job is not job:  # left by a world of which a rank was lost
        _end(graceful=False)
    agreement = agree(job, Request(name, backend, rank, world_size, rpc_backend_options))
    store, number = _store_of(job)
    worker = Worker(job, agreement)
    worker.start(store, number)
    _worker = worker
    job.before_end.append(_end)


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """End RPC on this rank; do nothing if it does not run. Collective over the job if `graceful`.

    A rank that has called this still answers calls. It waits until all ranks have called it and no call is in
    progress. `mpisgd.shutdown()` and the end of the program do the same.

    Args:
        graceful: False: end at once; calls from and to this rank fail.
        timeout: seconds to wait for the other ranks since the last call from one of them; default the job's
            timeout.

    Raises:
        CollectiveTimeout: a rank, which the message names, did not call it in time. RPC has ended on this
            rank.
        Deadlock: this rank and another one wait for each other.
    """
    _end(graceful, timeout)


def _end(graceful: bool = True, timeout_s: float | None = None) -> None:
    """End the worker, if there is one."""
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        if _end in worker.job.before_end:
            worker.job.before_end.remove(_end)
        worker.end(graceful=graceful, timeout_s=timeout_s)


def _store_of(job: Job) -> tuple[Store, int]:
    """Return the store of the job's starts of RPC, and the number of this start. Collective."""
    global _job_store
    if _job_store is None or _job_store.job is not job:
        stores: list[Store] = []
        queue, where = job.world.queue, job.world.topology
        queue.run(
            Operation("open_store"),
            lambda: stores.append(open_store(queue.communicator, where, job.timeout_s)),
        )
        _job_store = _JobStore(job, stores[0], itertools.count())
        job.at_end.append(_drop_store)
    return _job_store.store, next(_job_store.numbers)


def _drop_store() -> None:
    """Let the store go: between hosts it has connections."""
    global _job_store
    dropped, _job_store = _job_store, None
    if dropped is not None and isinstance(dropped.store, NetworkStore):
        dropped.store.close()
