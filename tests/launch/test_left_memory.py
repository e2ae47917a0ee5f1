"""A rank that leaves an all-reduce in its middle: who comes late writes nothing into its memory."""

from __future__ import annotations

import pytest
from launcher import run_python

BEGINNING = """
import sys, time, torch, mpisgd
from mpisgd.transport.cma.transport import CHUNK_BYTES, CmaTransport

mpisgd.init()
group = mpisgd.new_group()
if [transport.name for transport in group.transports] != ["node", "direct"]:
    print("cannot")
    sys.exit()
group.shared_memory._timeout_s = 2.0
"""

LEAVING = """
length = 8 * group.size * CHUNK_BYTES // 4
mine = torch.full((length,), group.rank + 1.0)
combine, chunks = CmaTransport.combine, []

def slow(self, *args):
    chunks.append(args)
    time.sleep(0.2 if group.rank == 0 else 0.1)
    if group.rank == 0 and len(chunks) == 2:
        raise KeyboardInterrupt
    combine(self, *args)

CmaTransport.combine = slow
try:
    mpisgd.all_reduce(mine, group=group, algorithm="direct")
except KeyboardInterrupt:
    left = mine.clone()
    time.sleep(1.2)  # the others have time for all their chunks
    print("written before:", bool((left[length // group.size :] != 1.0).any()))
    print("left to write:", bool((left[length // group.size :] == 1.0).any()))
    print("written after:", not torch.equal(mine, left), flush=True)
    time.sleep(60)
"""


def of_three_ranks(program: str):
    """The end of a job that fails since a rank has left."""
    done = run_python("-c", BEGINNING + program, num_ranks=3)
    if "cannot" in done.stdout:
        pytest.skip("this machine does not let processes reach each other's memory")
    assert done.returncode != 0
    return done


# Rank 0 has gone before the others come at all: its offer and its arrival still stand.
LEFT_BEFORE = """
mine = torch.full((2**20,), group.rank + 1.0)
if group.rank == 0:
    group.queue.consistency.timeout_s = 0.5
else:
    time.sleep(2)
try:
    mpisgd.all_reduce(mine, group=group, algorithm="direct")
except mpisgd.CollectiveTimeout:
    if group.rank:
        raise
    time.sleep(2.5)
    print("touched:", bool((mine != 1.0).any()), flush=True)
    time.sleep(60)
"""


def test_nobody_touches_the_memory_of_a_rank_that_left_before_the_others_came():
    done = of_three_ranks(LEFT_BEFORE)
    assert done.stdout == "touched: False\n"
    assert "has waited 2.0 s in the middle of an operation for rank 0" in done.stderr


def test_nobody_writes_into_the_memory_of_a_rank_that_has_left():
    """The others raise at their timeout, and the job ends."""
    done = of_three_ranks(LEAVING)
    assert done.stdout == "written before: True\nleft to write: True\nwritten after: False\n"
    assert "has waited 2.0 s in the middle of an operation for rank 0" in done.stderr
