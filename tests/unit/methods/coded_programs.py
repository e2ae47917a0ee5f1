"""What the tests of `Sharded` with codes between hosts have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from paper_programs import Program, assert_same, momentum
from torch import nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.tools.verification.method_matrix import Row, rows

FOUR = Program(size=4, hosts=(2, 2), make=momentum)


def on_hosts(train: Callable[[], Any], hosts: Sequence[int] = (2, 2)) -> list[Any]:
    """Return what the ranks of some hosts return."""
    return run_ranks(sum(hosts), train, seed=1, ranks_per_host=hosts)


def coded_row(text: str, strategy: str) -> Row:
    """Return the row of the matrix whose name has a text, with blocks that end inside of its parameters."""
    row = next(each for each in rows() if text in each.name)
    return row._replace(optimizer=replace(row.optimizer, options=(("strategy", strategy),)))


def in_turn(names: Sequence[str | None], divisions: Sequence[tuple[int, int]]) -> list[Any]:
    """Each of what happens on each division into hosts; in the short form each on one of them."""
    return [
        pytest.param(name, division, marks=() if place % len(divisions) == number else pytest.mark.long)
        for place, name in enumerate(names)
        for number, division in enumerate(divisions)
    ]


def assert_resumes(wrapped: Callable[[dict[str, nn.Parameter]], Any], *, model_first: bool = True) -> None:
    """Compare a run that is resumed after three steps with one that is not."""

    def train(resumes: bool) -> list[dict[str, torch.Tensor]]:
        params = FOUR.start(mpisgd.rank())
        optimizer = wrapped(params)
        for step in range(6):
            if resumes and step == 3:
                state, values = optimizer.state_dict(), {n: p.detach().clone() for n, p in params.items()}
                params = FOUR.start(mpisgd.rank())
                optimizer = wrapped(params)
                for loads in (model_first, not model_first):
                    if not loads:
                        optimizer.load_state_dict(state)
                        continue
                    with torch.no_grad():
                        for name, param in params.items():
                            param.copy_(values[name])
            optimizer.zero_grad()
            for term in FOUR.terms(mpisgd.rank(), step):
                FOUR.loss(params, mpisgd.rank(), term).backward()
            optimizer.step()
        return [{name: param.detach().clone() for name, param in params.items()}]

    assert_same(on_hosts(lambda: train(True)), on_hosts(lambda: train(False)), 0.0)
