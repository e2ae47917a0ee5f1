"""`PerHost`: a rank that leads its host for the first time, and others that have for some steps."""

from __future__ import annotations

import pytest
import torch

from mpisgd import compress
from mpisgd.compress.compressor import BucketLayout
from mpisgd.core.consistency import Operation
from mpisgd.dtypes import ReduceOp
from mpisgd.job.lifecycle import world
from mpisgd.job.threads_as_ranks import run_ranks

NUMEL = 40


def reduced(leads_for_steps: int) -> tuple[int, list[float]]:
    """Return what counts the steps, and a bucket, after one more; host 1 has had a leader for some before."""
    group = world()
    reducer = compress.PerHost(compress.RandomK(ratio=0.25)).reducer(
        BucketLayout((torch.Size([NUMEL]),), torch.float64)
    )
    if group.rank == 2:
        reducer.load_state_dict({"steps": leads_for_steps})
    bucket = torch.arange(1.0, NUMEL + 1, dtype=torch.float64) + group.rank
    group.queue.run(Operation("a bucket"), lambda: reducer.reduce(bucket, group, ReduceOp.AVG))
    return reducer.state.steps, bucket.tolist()


@pytest.mark.parametrize("steps", [0, 5])
def test_leaders_count_as_the_first_one_does(steps):
    # The first one has not begun: the others went on from their own count, and chose other elements.
    found = run_ranks(4, lambda: reduced(steps), ranks_per_host=(2, 2))
    buckets = [bucket for _, bucket in found]
    assert [found[rank][0] for rank in (0, 2)] == [1, 1]
    assert all(bucket == buckets[0] for bucket in buckets)
    sent = [(place, value) for place, value in enumerate(buckets[0]) if value]
    assert len(sent) == NUMEL // 4
    assert all(value == place + 2.5 for place, value in sent)
