"""The parts of operations that need no other rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.horovod.engine.operations import rows_of, scale


@given(st.integers(0, 1000), st.integers(1, 20))
def test_rows_are_shared_as_equally_as_can_be_with_the_rest_for_the_first(num_rows, size):
    starts = rows_of(num_rows, size)
    shares = [end - start for start, end in itertools.pairwise(starts)]
    assert (starts[0], starts[-1], len(shares)) == (0, num_rows, size)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


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
