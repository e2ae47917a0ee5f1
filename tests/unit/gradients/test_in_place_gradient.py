"""`InPlaceGradient`: reduced where autograd has put it, unless somebody else uses that memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

from mpisgd.gradients.bucketing import Item, plan_buckets
from mpisgd.gradients.in_place_gradient import InPlaceGradient


def parameter(*shape: int, channels_last: bool = False) -> Parameter:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return Parameter(values.contiguous(memory_format=torch.channels_last) if channels_last else values)


def solo_of(param: Parameter) -> InPlaceGradient:
    (bucket,) = plan_buckets([Item(0, param.numel(), param.element_size(), "k")], cap_bytes=1)
    return InPlaceGradient(bucket, param)


@torch.no_grad()
def reduced(solo: InPlaceGradient, param: Parameter, exists: bool = True) -> None:
    """What a reducer does; the sum over two equal ranks."""
    solo.load([param.grad], set())
    solo.flat.mul_(2)
    solo.unload([param], [exists])


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_backward_made_is_reduced_in_place(channels_last):
    param = parameter(2, 3, 4, 5, channels_last=channels_last)
    (param * param).sum().backward()
    made = param.grad
    reduced(solo_of(param), param)
    assert param.grad is made
    assert torch.equal(made, 4 * param.detach())
    assert made.stride() == param.stride()


@pytest.mark.parametrize("still_used", [lambda grad: grad[None], lambda grad: grad.detach()])
def test_what_others_still_read_is_left_alone(still_used):
    param = parameter(3, 2)
    (param * param).sum().backward()
    other = still_used(param.grad)
    before = other.clone()
    reduced(solo_of(param), param)
    assert torch.equal(other, before)
    assert torch.equal(param.grad, 4 * param.detach())


def test_a_gradient_of_another_type_travels_as_its_parameter():
    param = parameter(3, 2)
    solo = solo_of(param)
    solo.load([torch.full((3, 2), 0.5, dtype=torch.float64)], set())
    assert solo.flat.dtype == torch.float32
    assert solo.flat.tolist() == [0.5] * 6


def test_a_missing_gradient_counts_as_zero_and_appears_where_others_have_one():
    param, solo = parameter(3, 2), solo_of(parameter(3, 2))
    solo.load([None], set())
    assert solo.flat.tolist() == [0.0] * 6
    solo.flat.add_(5)
    solo.unload([param], [True])
    assert param.grad.tolist() == [[5.0, 5.0]] * 3
    reduced(solo, param, exists=False)
    assert param.grad is None


def test_a_sparse_one_counts_as_zero_for_it_travels_apart():
    param = parameter(3, 2)
    solo = solo_of(param)
    solo.load([torch.ones(3, 2).to_sparse(1)], set())
    assert solo.flat.tolist() == [0.0] * 6


def transposed(param: Parameter) -> torch.Tensor:
    return torch.ones(tuple(reversed(param.shape))).t()


def part_of_something(param: Parameter) -> torch.Tensor:
    return torch.ones(2, *param.shape)[1]


def with_a_graph(param: Parameter) -> torch.Tensor:
    return torch.ones(param.shape, requires_grad=True) * 1


@pytest.mark.parametrize("make", [transposed, part_of_something, with_a_graph])
def test_a_gradient_that_others_look_at_is_copied(make):
    param = parameter(3, 2)
    given = make(param)
    param.grad = given
    reduced(solo_of(param), param)
    assert param.grad is not given
    assert torch.equal(param.grad, torch.full((3, 2), 2.0))
    assert torch.equal(given, torch.ones(3, 2))
    assert param.grad.stride() == param.stride()
    assert not param.grad.requires_grad


def test_a_dimension_of_length_one_may_have_any_stride():
    param = parameter(4, 1, 3)
    param.grad = torch.empty_strided((4, 1, 3), (3, 7, 1)).fill_(1.0)
    made = param.grad
    reduced(solo_of(param), param)
    assert param.grad is made


def test_it_keeps_nothing_alive():
    param = parameter(3, 2)
    solo = solo_of(param)
    (param * param).sum().backward()
    reduced(solo, param)
    watched = weakref.ref(param.grad.untyped_storage())
    param.grad = None
    gc.collect()
    assert watched() is None


def test_it_fits_the_parameter_it_was_made_for_only():
    solo = solo_of(parameter(3, 2))
    assert solo.fits([parameter(3, 2)])
    assert not solo.fits([parameter(2, 3)])
    assert not solo.fits([torch.zeros(3, 2, dtype=torch.float64)])
