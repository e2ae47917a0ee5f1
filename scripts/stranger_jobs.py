"""A job that starts what strangers could come in by, again and again; `scripts/strangers` runs it.

mpirun -n 2 python scripts/stranger_jobs.py FOLDER STARTS KIND:STRANGER...
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from stranger_meeting import announce, welcome

import mpisgd
from mpisgd import rpc
from mpisgd.core.topology import arrange
from mpisgd.job.lifecycle import world
from mpisgd.monitor import job_finder
from mpisgd.transport.tcp_store.store import open_store

WAIT_S = 30.0
job_finder.ANSWER_S = 0.3  # a stranger does not answer as ranks do


def use_rpc() -> None:
    """Start it, call every rank in both ways, end it."""
    rpc.init_rpc()
    ranks = range(mpisgd.size())
    sums = [rpc.rpc_async(rank, torch.add, (torch.tensor(rank), 1)) for rank in ranks]
    lengths = [rpc.rpc_async(rank, len, ("x" * rank,)) for rank in ranks]
    assert [int(answer.wait()) for answer in sums] == [rank + 1 for rank in ranks]
    assert [answer.wait() for answer in lengths] == [*ranks]
    rpc.shutdown()


def use_store() -> None:
    """Open the store as between hosts, have every rank write and read, close it."""
    rank, size = mpisgd.rank(), mpisgd.size()
    where = arrange(rank, list(range(size)), [f"host{each}" for each in range(size)])
    store = open_store(world().queue.communicator, where, WAIT_S)
    store.set(f"from {rank}", str(rank))
    assert [store.get(f"from {each}") for each in range(size)] == [b"%d" % each for each in range(size)]
    assert not store.check(["nccl_id"]), "a stranger has written into the store"
    mpisgd.barrier()
    if hasattr(store, "close"):
        store.close()


def use_top() -> None:
    """Look at all jobs of this user, as `python -m mpisgd top` does."""
    if mpisgd.rank() == 0:
        for job in job_finder.find_jobs():
            job.states()


KINDS: dict[str, Callable[[], None]] = {"store": use_store, "rpc": use_rpc, "top": use_top}


def main() -> None:
    """Start and end, as often as is asked for."""
    folder, starts = Path(sys.argv[1]), int(sys.argv[2])
    strangers = [name.split(":") for name in sys.argv[3:]]
    warnings.simplefilter("ignore", RuntimeWarning)  # of strangers that were turned away
    mpisgd.init()
    for start in range(starts):
        for kind, use in KINDS.items():
            if mpisgd.rank() == 0:
                welcome(folder, kind, start, [name for of_kind, name in strangers if of_kind == kind])
            mpisgd.barrier()
            use()
            mpisgd.barrier()
            if mpisgd.rank() == 0:
                announce(folder, f"done {kind} {start}")


if __name__ == "__main__":
    main()
