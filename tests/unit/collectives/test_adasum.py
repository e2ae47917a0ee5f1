"""Adasum: a sum where gradients are orthogonal, an average where they are parallel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpisgd.collectives.algorithms.adasum import adasum


def formula(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot = np.sum(a * b)
    return (1 - dot / (2 * np.sum(a * a))) * a + (1 - dot / (2 * np.sum(b * b))) * b


def draw(number: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(number)
    return [torch.randn(3, 5, generator=source, dtype=torch.float64).to(dtype) for _ in range(number)]


def near(got: torch.Tensor, wanted: np.ndarray, tolerance: float = 1e-13) -> None:
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=tolerance, atol=tolerance)


def test_two_gradients_follow_the_formula():
    a, b = draw(2)
    near(adasum([a, b]), formula(a.numpy(), b.numpy()))


def test_three_and_four_are_combined_pair_by_pair():
    arrays = [tensor.numpy() for tensor in draw(4)]
    tensors = [torch.from_numpy(array) for array in arrays]
    pair = formula(arrays[0], arrays[1])
    near(adasum(tensors[:3]), formula(pair, arrays[2]))
    near(adasum(tensors), formula(pair, formula(arrays[2], arrays[3])))


@pytest.mark.parametrize("number", range(1, 10))
def test_orthogonal_gradients_are_added(number):
    tensors = list(torch.eye(number, dtype=torch.float64) * torch.arange(1.0, number + 1))
    near(adasum(tensors), np.arange(1.0, number + 1))


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_equal_gradients_are_averaged(number):
    (gradient,) = draw(1)
    near(adasum([gradient.clone() for _ in range(number)]), gradient.numpy())


@pytest.mark.parametrize("ratio", [0.5, 3.0, -1.0])
def test_parallel_gradients_of_any_length_are_averaged(ratio):
    (gradient,) = draw(1)
    near(adasum([gradient, gradient * ratio]), gradient.numpy() * (1 + ratio) / 2)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scaling_all_gradients_scales_the_result(factor):
    """Squares of these numbers do not exist in float32."""
    tensors = [tensor.float() for tensor in draw(2)]
    scaled = adasum([tensor * factor for tensor in tensors])
    near(scaled.double() / factor, adasum(tensors).double().numpy(), 1e-5)


def test_zeros_beside_a_gradient_change_nothing():
    (gradient,) = draw(1)
    zero = torch.zeros_like(gradient)
    near(adasum([gradient, zero]), gradient.numpy(), 0)
    near(adasum([zero, gradient]), gradient.numpy(), 0)
    near(adasum([zero, zero]), zero.numpy(), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_and_shape_stay_and_what_is_given_too(dtype):
    tensors = draw(3, dtype)
    copies = [tensor.clone() for tensor in tensors]
    assert (adasum(tensors).dtype, adasum(tensors).shape) == (dtype, (3, 5))
    assert all(map(torch.equal, tensors, copies))
