"""Which optimizers may be given parts of parameters: those whose bits do not depend on how these are cut."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.sharding.elementwise import KNOWN, is_known_elementwise, may_join, single_step

ALIGN_BYTES = 64
NUMEL = 2011
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class Overridden(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_torchs_own_are_known_and_no_others():
    params = [nn.Parameter(torch.ones(2))]
    assert all(is_known_elementwise(cls(params)) for cls in KNOWN)
    others = [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, Overridden]
    assert not any(is_known_elementwise(cls(params)) for cls in others)
    assert not is_known_elementwise(torch.optim.Adam(params, differentiable=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KNOWN), *((kind, {"fused": True}) for kind in FUSED)],
    ids=lambda what: getattr(what, "__name__", "fused" if what else ""),
)
def test_bits_do_not_depend_on_how_parameters_are_cut(kind, options, dtype):
    """Anywhere where neighbours may be joined; else at the beginning of cache lines."""
    draw = torch.Generator().manual_seed(1)
    first, *grads = (torch.randn(NUMEL, generator=draw).to(dtype) for _ in range(4))
    step = 1 if may_join(options, dtype) else ALIGN_BYTES // dtype.itemsize
    widths = itertools.accumulate(itertools.cycle([step * n for n in (1, 3, 7, 17)]))
    cuts = [0, *itertools.takewhile(lambda cut: cut < NUMEL, widths), NUMEL]
    if kind is torch.optim.SGD:
        options = {**options, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    whole = nn.Parameter(first.clone())
    parts = [nn.Parameter(first[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    for params in ([whole], parts):
        optimizer = kind(params, lr=0.01, **options)
        bounds = [(0, NUMEL)] if params[0] is whole else list(itertools.pairwise(cuts))
        for grad in grads:
            for param, (a, b) in zip(params, bounds, strict=True):
                param.grad = grad[a:b].clone()
            with torch.no_grad():
                single_step(optimizer)(optimizer)
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach())


def test_a_step_stays_known_where_torch_has_wrapped_that_of_the_parent_too():
    # A class of which one was made before its parent has a wrapped step of its own; ours then notes which of
    # the two is the outer one.
    class Child(torch.optim.Adam):
        step = torch.optim.Optimizer.profile_hook_step(torch.optim.Adam.step)

    params = [torch.nn.Parameter(torch.zeros(2))]
    (optimizer,) = run_ranks(1, lambda: mpisgd.DistributedOptimizer(Child(params)))
    assert "step" in vars(type(optimizer))
    assert is_known_elementwise(optimizer)


def test_a_step_that_only_looks_like_one_of_torchs_is_not_known():
    class Clipped(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW.step)
        def step(self, closure=None):
            return super().step(closure)

    assert not is_known_elementwise(Clipped([torch.zeros(2, requires_grad=True)]))
