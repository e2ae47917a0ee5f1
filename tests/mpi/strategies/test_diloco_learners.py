"""Learners of several ranks among processes: what one process does by the paper, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_programs import Program, by_paper, definition_of, momentum, sgd, trained_here
from torch import nn
from verdicts import everyone

import mpisgd
from mpisgd import DiLoCo

EXACT = {"lr": 0.5, "momentum": 0.25}  # of the outer SGD


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("weights", ["equal", "tokens"])
@pytest.mark.parametrize("make", [sgd, momentum])
@pytest.mark.parametrize("rows", [6, 60_000], ids=["small", "large"])
def test_learners_are_diloco_with_synchronous_steps_inside_bit_for_bit(weights, make, rows):
    size = mpisgd.size()
    learners = "host" if size % 2 else 2
    program = replace(Program(size=size, make=make, steps=5), rows=rows)
    strategy = DiLoCo(2, quorum="all", weights=weights, learners=learners, outer_options=EXACT)

    def wrapped(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return mpisgd.DistributedOptimizer(make(list(params.values())), params.items(), strategy=strategy)

    found = trained_here(program, wrapped)
    expected = by_paper(program, definition_of(program, strategy=strategy))[mpisgd.rank()]
    wrong = [
        f"step {step}, {name}"
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True))
        for name in theirs
        if not torch.equal(mine[name], theirs[name])
    ]
    everyone(not wrong, f"rank {mpisgd.rank()}: {wrong}")
