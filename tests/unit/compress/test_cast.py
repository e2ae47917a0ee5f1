"""Compression by casting: what travels, and what comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mpisgd
from mpisgd.methods.cast.cast import Compression

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WIDE = (torch.float32, torch.float64)
halves = pytest.mark.parametrize("name", HALVES)
numbers = st.lists(st.floats(-1000, 1000, width=32), max_size=20)


@halves
@pytest.mark.parametrize("dtype", WIDE)
@settings(deadline=None)
@given(values=numbers)
def test_floats_travel_as_halves_and_return_rounded_once(name, dtype, values):
    flat = torch.tensor(values, dtype=dtype)
    given_values = flat.clone()
    compression = getattr(Compression, name)
    wire = compression.compress(flat)
    assert wire.dtype is HALVES[name]
    assert torch.equal(flat, given_values)
    compression.decompress(wire, flat)
    assert torch.equal(flat, given_values.to(HALVES[name]).to(dtype))


@pytest.mark.parametrize("name", ["none", *HALVES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int32])
def test_what_is_narrow_or_no_float_travels_as_it_is(name, dtype):
    flat = torch.ones(3, dtype=dtype)
    compression = getattr(Compression, name)
    assert compression.compress(flat) is flat
    compression.decompress(flat, flat)
    assert torch.equal(flat, torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("dtype", WIDE)
def test_none_changes_nothing(dtype):
    flat = torch.randn(5, dtype=dtype)
    assert Compression.none.compress(flat) is flat


def test_beyond_its_range_fp16_becomes_inf_and_bf16_does_not():
    flat = torch.tensor([1e6, -1e6])
    assert Compression.fp16.compress(flat).tolist() == [float("inf"), -float("inf")]
    assert Compression.bf16.compress(flat).isfinite().all()


def test_small_gradients_vanish_in_fp16_and_not_in_bf16():
    flat = torch.tensor([1e-9])
    assert Compression.fp16.compress(flat).item() == 0
    assert Compression.bf16.compress(flat).item() > 0


def test_names_are_what_one_writes():
    assert mpisgd.Compression is Compression
    assert [repr(getattr(Compression, name)) for name in ("none", *HALVES)] == [
        "Compression.none",
        "Compression.fp16",
        "Compression.bf16",
    ]
