"""A job that starts what strangers could come in by, again and again; `scripts/strangers` runs it.

mpirun -n 2 python scripts/security/stranger_jobs.py FOLDER FIRST STARTS KIND:STRANGER...
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from stranger_meeting import announce, meet, welcome

import mpisgd
from mpisgd import rpc
from mpisgd.core.topology import arrange
from mpisgd.job.lifecycle import world
from mpisgd.tools.cli import job_finder
from mpisgd.transport.tcp_store.store import open_store

WAIT_S = 30.0
job_finder.ANSWER_S = 0.3  # a stranger does not answer as ranks do
Phases = Callable[[str], None]  # called by all ranks at `run` and at `end`


def use_rpc(now: Phases) -> None:
    """Start it, call every rank in both ways, end it."""
    rpc.init_rpc()
    now("run")
    ranks = range(mpisgd.size())
    sums = [rpc.rpc_async(rank, torch.add, (torch.tensor(rank), 1)) for rank in ranks]
    lengths = [rpc.rpc_async(rank, len, ("x" * rank,)) for rank in ranks]
    assert [int(answer.wait()) for answer in sums] == [rank + 1 for rank in ranks]
    assert [answer.wait() for answer in lengths] == [*ranks]
    now("end")
    rpc.shutdown()


def use_store(now: Phases) -> None:
    """Open the store as between hosts, have every rank write and read, close it."""
    rank, size = mpisgd.rank(), mpisgd.size()
    where = arrange(rank, list(range(size)), [f"host{each}" for each in range(size)])
    store = open_store(world().queue.communicator, where, WAIT_S)
    now("run")
    store.set(f"from {rank}", str(rank))
    assert [store.get(f"from {each}") for each in range(size)] == [b"%d" % each for each in range(size)]
    assert not store.check(["nccl_id"]), "a stranger has written into the store"
    now("end")
    if hasattr(store, "close"):
        store.close()


def use_top(_: Phases) -> None:
    """Look at all jobs of this user, as `python -m mpisgd top` does."""
    if mpisgd.rank() == 0:
        for job in job_finder.find_jobs():
            job.states()


KINDS: dict[str, Callable[[Phases], None]] = {"store": use_store, "rpc": use_rpc, "top": use_top}


def main() -> None:
    """Start and end, as often as is asked for."""
    folder, first, starts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    strangers = [name.split(":") for name in sys.argv[4:]]
    warnings.simplefilter("ignore", RuntimeWarning)  # of strangers that were turned away
    mpisgd.init()
    for start in range(first, starts):
        for kind, use in KINDS.items():
            names = [name for of_kind, name in strangers if of_kind == kind]

            def now(phase: str, kind: str = kind, start: int = start, names: list[str] = names) -> None:
                mpisgd.barrier()
                if mpisgd.rank() == 0:
                    meet(folder, kind, start, phase, names)
                mpisgd.barrier()

            if mpisgd.rank() == 0:
                welcome(folder, kind, start, names)
            mpisgd.barrier()
            use(now)
            mpisgd.barrier()
            if mpisgd.rank() == 0:
                announce(folder, f"done {kind} {start}")


if __name__ == "__main__":
    main()
