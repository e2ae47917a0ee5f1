"""A resumed run packs gradients as the one before: what compressors choose depends on their places."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd import compress
from mpisgd.job.threads_as_ranks import run_ranks

DRAWING = [
    compress.RandomK(ratio=0.5),
    compress.QSGD(bits=2),
    compress.TernGrad(),
    compress.Natural(),
]


def train(compression, resumes_after=None, freezes=False, loads_over=False):
    """Return the parameters of a run, of which the two are used in another order in every step.

    With `loads_over` it goes on with an optimizer that has trained them in yet another order before.
    """
    shapes = [(5,), (3,)]
    params = [nn.Parameter(torch.linspace(1, 2, n)) for (n,) in shapes]

    def make():
        return mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), compression=compression)

    def backward(step):
        loss = torch.zeros(())
        for param in params if step % 2 else reversed(params):
            loss = torch.tanh(loss + (param * torch.arange(1.0, 1 + param.numel())).sum() / 20)
        loss.backward()

    optimizer = make()
    for step in range(4):
        if freezes:
            params[0].requires_grad_(step not in (1, 2))
        backward(step)
        optimizer.step()
        if step == resumes_after:
            saved = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params]))
            optimizer = make()
            if loads_over:
                optimizer.zero_grad()
                backward(1)
                optimizer.step()
                torch._foreach_copy_([param.detach() for param in params], saved[1])
            optimizer.load_state_dict(saved[0])
        optimizer.zero_grad()
    return [param.tolist() for param in params]


@pytest.mark.parametrize("loads_over", [False, True])
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("compression", DRAWING, ids=lambda each: type(each).__name__)
def test_a_resumed_run_draws_what_the_whole_one_does(compression, freezes, loads_over):
    def program():
        whole = train(compression, freezes=freezes)
        return [train(compression, after, freezes, loads_over) == whole for after in range(3)]

    assert run_ranks(2, program) == [[True] * 3] * 2


def test_a_state_without_an_order_is_read_and_one_that_matters_to_nobody_is_not_kept():
    def program():
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]

        def make(compression):
            return mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), compression=compression)

        def step(optimizer):
            sum(param.sum() for param in params).backward()
            optimizer.step()
            return optimizer.state_dict()

        state = step(make(compress.Natural()))
        for entries in state["mpisgd"]["alike"]["compression"].values():
            del entries["place"]
        former = make(compress.Natural())
        former.load_state_dict(state)
        places = [e["place"] for e in step(former)["mpisgd"]["alike"]["compression"].values()]
        return sorted(places), "mpisgd" in step(make(mpisgd.Compression.bf16)), "mpisgd" in step(make(None))

    assert run_ranks(2, program) == [([0, 1], False, False)] * 2
