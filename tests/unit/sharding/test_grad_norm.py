"""Clipping where gradients are divided: what torch raises in one process is raised by every rank."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks


@pytest.mark.parametrize("strategy", [mpisgd.ParameterServer(), mpisgd.Sharded()], ids=repr)
def test_a_norm_that_is_not_defined_is_told_by_every_rank(strategy):
    # The owner of the empty gradient raised alone, and the others were told of a mismatch.
    def clip() -> str:
        params = [torch.nn.Parameter(torch.ones(numel)) for numel in (0, 3)]
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), strategy=strategy)
        sum(param.sum() for param in params).backward()
        assert optimizer.clip_grad_norm_(1.0, 2.0).item() == pytest.approx(3**0.5)
        with pytest.raises(
            RuntimeError, match="order inf of a gradient without elements is not defined"
        ) as e:
            optimizer.clip_grad_norm_(1.0, float("inf"))
        return str(e.value)

    said = run_ranks(2, clip)
    assert said[0] == said[1]
