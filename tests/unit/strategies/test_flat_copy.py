"""Copies of all parameters in one piece of memory."""

from __future__ import annotations

import torch

from mpisgd.methods.strategy.flat_copy import FlatCopy


def params() -> list[torch.Tensor]:
    return [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(4.0, dtype=torch.float64),
        torch.empty(0),
        torch.arange(5.0, dtype=torch.bfloat16),
        torch.arange(3.0) + 7,
    ]


def test_what_is_loaded_is_unloaded():
    copy = FlatCopy(params())
    copy.load(params())
    another = copy.new_like()
    another.copy_(copy)
    back = [torch.zeros_like(param) for param in params()]
    another.unload(back)
    assert all(map(torch.equal, back, params()))


def test_a_share_of_a_difference_is_added():
    x, large, small = (FlatCopy(params()) for _ in range(3))
    large.load([param + 4 for param in params()])
    small.load(params())
    x.load(params())
    x.add_difference_(large, small, 0.5)
    back = [torch.zeros_like(param) for param in params()]
    x.unload(back)
    assert all(torch.equal(a, b + 2) for a, b in zip(back, params(), strict=True))
