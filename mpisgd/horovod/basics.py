"""`init`, `shutdown`, ranks and sizes, `join`, `barrier`, the timeline, and what this build can do."""

import functools
from typing import Any

import torch

from mpisgd.arguments import check_flag, check_text
from mpisgd.horovod import state
from mpisgd.horovod.arguments import as_ranks
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request_table import JOIN
from mpisgd.horovod.engine.timeline import STOP, start_request
from mpisgd.horovod.ops.submission import make_request
from mpisgd.horovod.process_sets import ProcessSet, add_process_set, global_process_set
from mpisgd.horovod.state import is_initialized
from mpisgd.job import lifecycle, rank_info

__all__ = [
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start MPI and Horovod's operations, unless they run already. Collective over the job.

    Args:
        comm: an mpi4py communicator of the ranks that take part; default all that mpirun started.
        process_sets: process sets to add. Others can be added at any time, so "dynamic" has no effect.

    Raises:
        ValueError: two process sets of the same ranks, or a `comm` that is a list of other objects than
            ranks.
    """
    if isinstance(comm, list | tuple):
        ranks = as_ranks("init", "comm", comm)
        comm = _comm_of(tuple(ranks)) if ranks else None
    state.start(comm)
    for process_set in () if process_sets in (None, "dynamic") else process_sets:
        add_process_set(process_set)


@functools.cache  # the same ranks are the same communicator: after `shutdown()`, `init()` goes on with it
def _comm_of(ranks: tuple[int, ...]) -> Any:
    """Return the communicator of some of the processes that mpirun has started. Collective over them."""
    from mpisgd.transport.mpi import MPI, start

    start()
    everyone = MPI.COMM_WORLD.Get_group()
    some = everyone.Incl(list(ranks))
    try:
        return MPI.COMM_WORLD.Create_group(some)
    finally:
        some.Free()
        everyone.Free()


def shutdown() -> None:
    """Finish submitted operations, and wait for all ranks to call it. `init()` may be called again."""
    state.stop()


def rank() -> int:
    """Return this process's rank in the job."""
    state.engine()
    return rank_info.rank()


def size() -> int:
    """Return the number of ranks."""
    state.engine()
    return rank_info.size()


def local_rank() -> int:
    """Return the index of this rank among those of its host."""
    state.engine()
    return rank_info.local_rank()


def local_size() -> int:
    """Return how many ranks share this host."""
    state.engine()
    return rank_info.local_size()


def cross_rank() -> int:
    """Return the index of this rank among the ranks with the same local rank."""
    return _cross().index(rank())


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return len(_cross())


def _cross() -> list[int]:
    local = local_rank()
    return [ranks[local] for ranks in rank_info.topology().nodes if len(ranks) > local]


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    state.engine()
    return len(set(rank_info.topology().ranks_per_host)) == 1


def join(device: int = -1) -> int:
    """Take part in the operations of the other ranks, without data, until all ranks have joined.

    For ranks that have no more data: they contribute the neutral element of each reduction. Other operations
    (allgather, alltoall, broadcast, reducescatter) raise an error while a rank has joined.

    Args:
        device: not used; for compatibility.

    Returns:
        The rank that joined last, the same on all of them.
    """
    last: int = state.engine().perform(Entry(JOIN))
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every member has called it."""
    state.engine().perform(Entry(make_request("barrier", "barrier", [], process_set)))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the operations of all ranks into one file, which is written when the timeline ends.

    May be called on one rank or on several: the first call applies to all. See `mpisgd.start_timeline`.

    Args:
        file_path: as for `mpisgd.start_timeline`.
        mark_cycles: whether to note when the ranks negotiate.

    Raises:
        InvalidArgument: a rank cannot write the file.
    """
    check_text("start_timeline", "file_path", file_path)
    check_flag("start_timeline", "mark_cycles", mark_cycles)
    state.engine().perform(Entry(start_request(file_path, mark_cycles)))


def stop_timeline() -> None:
    """End the timeline on all ranks, and write its file; do nothing without one."""
    state.engine().perform(Entry(STOP))


def mpi_threads_supported() -> bool:
    """Return whether MPI runs at THREAD_MULTIPLE."""
    state.engine()
    return lifecycle.current_job().threads_allowed


def mpi_enabled() -> bool:
    """Return True: everything is negotiated over MPI."""
    return True


def gloo_enabled() -> bool:
    """Return False: nothing here is built on gloo, DDL or oneCCL."""
    return False


mpi_built = mpi_enabled
gloo_built = ddl_built = ccl_built = gloo_enabled


def nccl_built() -> int:
    """Return the version of torch's NCCL as one number; 0 without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None
