"""The parts of operations that need no other rank."""

from __future__ import annotations

import pytest
import torch

from mpisgd.horovod.engine.operations import scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
def test_floats_are_multiplied_in_place(dtype):
    x = torch.tensor([1, -2, 3]).to(dtype)
    view = x[:]
    scale(x, 0.5)
    assert torch.equal(view, torch.tensor([0.5, -1, 1.5]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_integers_are_multiplied_exactly_and_cut_off_toward_zero(dtype):
    x = torch.tensor([3, 5, 100]).to(dtype)
    scale(x, 0.5)
    assert x.tolist() == [1, 2, 50]


def test_negative_integers_are_cut_off_toward_zero_too():
    x = torch.tensor([-3, -5, 7])
    scale(x, 0.5)
    assert x.tolist() == [-1, -2, 3]


def test_a_factor_of_one_does_not_touch_even_what_float64_cannot_hold():
    x = torch.tensor([2**63 - 1])
    scale(x, 1.0)
    assert x.item() == 2**63 - 1
