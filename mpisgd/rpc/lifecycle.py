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
    """Make this rank a worker: now all ranks can call functions on each other. Collective over the job.

    As `torch.distributed.rpc.init_rpc`, without an address: the ranks find each other by MPI. On one host RPC
    listens on loopback alone, between hosts on the interface towards rank 0. When this returns all ranks are
    connected, and nobody else can connect any more. RPC ends with `shutdown()`, or with the job.

    Args:
        name: of this worker, the same on no other rank; default `worker{rank}`.
        backend: torch's BackendType.TENSORPIPE, or None for it.
        rank: this rank's, or -1 for it.
        world_size: the number of ranks of the job, or None for it.
        rpc_backend_options: a `TensorPipeRpcBackendOptions` for `num_worker_threads`, `rpc_timeout` (default:
            the job's timeout), `device_maps` and `devices`; its address is not used.

    Raises:
        UnsupportedTorch: this torch was built without RPC.
        AlreadyInitialized: RPC runs already.
        InvalidArgument: a name that is none or another rank's, a rank or size that is not the job's.
        Unreachable: the ranks cannot connect. As the errors above, on every rank.

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
    """End RPC on this rank; do nothing where it does not run. Collective over the job if `graceful`.

    A rank that has come to this still answers calls, and waits until all ranks have come and no call is under
    way. `mpisgd.shutdown()` and the end of the program do the same.

    Args:
        graceful: False to end this rank's part at once; calls from and to it fail.
        timeout: how many seconds to wait for the other ranks, counted from the last time that one of them
            called this rank; default the job's timeout.

    Raises:
        CollectiveTimeout: a rank did not come, which the message names. RPC has ended on this rank.
        Deadlock: a rank that this one waits for waits for this one.
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
