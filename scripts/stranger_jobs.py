"""A job that starts RPC again and again while strangers watch for its ports; `scripts/strangers` runs it.

mpirun -n 2 python scripts/stranger_jobs.py FOLDER STARTS STRANGER...
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from stranger_meeting import announce, await_all

import mpisgd
from mpisgd import rpc


def works() -> bool:
    """Whether every rank answers this one."""
    ranks = range(mpisgd.size())
    answers = [rpc.rpc_async(rank, torch.add, (torch.tensor(rank), 1)) for rank in ranks]
    lengths = [rpc.rpc_async(rank, len, ("x" * rank,)) for rank in ranks]
    return [int(answer.wait()) for answer in answers] == [rank + 1 for rank in ranks] and [
        length.wait() for length in lengths
    ] == [*ranks]


def main() -> None:
    """Start and end, as often as is asked for."""
    folder, starts, strangers = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore", RuntimeWarning)  # of strangers that were turned away
    mpisgd.init()
    for start in range(starts):
        if mpisgd.rank() == 0:
            await_all(folder, [f"{name} ready {start}" for name in strangers])
            announce(folder, f"watch {start}")
            await_all(folder, [f"{name} watches {start}" for name in strangers])
        mpisgd.barrier()
        rpc.init_rpc()
        assert works(), f"start {start}: RPC does not work"
        rpc.shutdown()
        mpisgd.barrier()
        if mpisgd.rank() == 0:
            announce(folder, f"done {start}")
            print(f"started {start}", flush=True)


if __name__ == "__main__":
    main()
