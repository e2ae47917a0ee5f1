"""`FusionBuffer` as data: views lie apart, hold what was absorbed, and become the gradients that exist."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.gradients.bucketing import Bucket, Item, plan_buckets
from mpisgd.gradients.fusion_buffer import FusionBuffer

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
KINDS = ("none", "view", "fresh", "sparse", "alias")


def buffer_of(bucket: Bucket, params: list[torch.Tensor]) -> FusionBuffer:
    return FusionBuffer(bucket, params, torch.full((bucket.numel,), 7).to(params[0].dtype))


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of `shape` whose dimensions lie in memory in `order`."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.zeros([shape[dim] for dim in order], dtype=dtype).permute(back)


@st.composite
def parameters(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    return laid_out(shape, order, torch.float64)


@st.composite
def buffers(draw: st.DrawFn) -> tuple[FusionBuffer, list[torch.Tensor]]:
    params = draw(st.lists(parameters(), min_size=1, max_size=6))
    dtype = draw(st.sampled_from(DTYPES))
    params = [laid_out_like(param, dtype) for param in params]
    items = [Item(i, param.numel(), param.element_size(), "k") for i, param in enumerate(params)]
    (bucket,) = plan_buckets(items, cap_bytes=2**30, align_bytes=draw(st.sampled_from([1, 64])))
    params = [params[index] for index in bucket.indices]
    return buffer_of(bucket, params), params


def laid_out_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(param.shape, param.stride(), dtype=dtype).zero_()


def places(view: torch.Tensor) -> list[int]:
    """Where in the storage the elements of `view` lie."""
    spans = (
        [stride * i for i in range(length)] for length, stride in zip(view.shape, view.stride(), strict=True)
    )
    return [view.storage_offset() + sum(steps) for steps in itertools.product(*spans)]


def gradient(kind: str, view: torch.Tensor, number: int) -> torch.Tensor | None:
    """A gradient of each kind, its elements all different."""
    values = (torch.arange(view.numel()) % 50 + number).to(view.dtype).view(view.shape)
    if kind == "none":
        return None
    if kind == "view":
        return view.copy_(values)
    if kind == "alias":
        view.copy_(values)
        return view.view(view.shape)
    if kind == "sparse" and view.dim() > 0:
        return values.to_sparse(1)
    return values


@settings(deadline=None)
@given(buffers())
def test_views_have_the_shapes_of_the_parameters_and_lie_apart(made):
    buffer, params = made
    assert [view.shape for view in buffer.views] == [param.shape for param in params]
    assert all(view.dtype == param.dtype for view, param in zip(buffer.views, params, strict=True))
    taken = [place for view in buffer.views for place in places(view)]
    assert len(set(taken)) == len(taken)
    assert all(0 <= place < buffer.bucket.numel for place in taken)


@settings(deadline=None)
@given(buffers())
def test_views_have_the_layout_of_the_parameters(made):
    """So that optimizers walk parameter and gradient in the same order."""
    buffer, params = made
    for view, param in zip(buffer.views, params, strict=True):
        assert view.stride() == param.stride() or param.numel() == 0


@settings(max_examples=300, deadline=None)
@given(buffers(), st.data())
def test_absorb_moves_what_exists_and_zeroes_what_does_not(made, data):
    buffer, params = made
    buffer.flat.fill_(77)  # whatever the last reduction left
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=len(params), max_size=len(params)))
    grads = [gradient(kind, view, i) for i, (kind, view) in enumerate(zip(kinds, buffer.views, strict=True))]
    dense = [grad is not None and not grad.is_sparse for grad in grads]
    before = [grad.clone() if grad is not None else None for grad in grads]
    buffer.load(grads, set())
    for view, grad, here in zip(buffer.views, before, dense, strict=True):
        assert torch.equal(view, grad if here else torch.zeros_like(view))


@settings(deadline=None)
@given(buffers(), st.data())
def test_what_exists_becomes_the_gradient_and_the_rest_none(made, data):
    buffer, shapes = made
    params = [torch.nn.Parameter(torch.empty_like(shape)) for shape in shapes]
    exists = data.draw(st.lists(st.booleans(), min_size=len(params), max_size=len(params)))
    for param, odd in zip(params, itertools.cycle([True, False]), strict=False):
        param.grad = torch.zeros_like(param) if odd else None
    buffer.unload(params, exists)
    for param, view, here in zip(params, buffer.views, exists, strict=True):
        assert param.grad is (view if here else None)


def test_a_view_of_its_own_is_not_a_write_to_the_others():
    bucket = plan_buckets([Item(0, 4, 4, "k"), Item(1, 4, 4, "k")], cap_bytes=2**20)[0]
    one, other = buffer_of(bucket, [torch.zeros(4), torch.zeros(4)]).views
    version = other._version
    one.add_(1)
    assert other._version == version
    assert other.sum() == 0


def test_gradients_may_have_changed_places_or_be_turned_inside_the_buffer():
    params = [torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(3, 3)]
    items = [Item(i, param.numel(), 4, "k") for i, param in enumerate(params)]
    (bucket,) = plan_buckets(items, cap_bytes=2**20, order=[0, 1, 2])
    buffer = buffer_of(bucket, params)
    for place, view in enumerate(buffer.views):
        view.copy_(torch.arange(view.numel()).view_as(view) + 10 * place)
    one, other, square = buffer.views
    expected = other.clone(), one.clone(), square.T.clone()
    buffer.load([other, one, square.T], set())
    assert all(torch.equal(view, wanted) for view, wanted in zip(buffer.views, expected, strict=True))


@pytest.mark.parametrize("attached", [True, False])
def test_a_view_that_was_given_other_data_is_made_anew(attached):
    params = [torch.zeros(2, 2), torch.zeros(3)]
    items = [Item(i, param.numel(), 4, "k") for i, param in enumerate(params)]
    (bucket,) = plan_buckets(items, cap_bytes=2**20, order=[0, 1])
    buffer = buffer_of(bucket, params)
    displaced, kept = buffer.views
    displaced.data = torch.full((2, 2), 5.0)
    buffer.load([displaced if attached else torch.full((2, 2), 5.0), kept], set())
    assert buffer.views[0] is not displaced
    assert buffer.views[1] is kept
    assert buffer.flat[:4].tolist() == [5.0] * 4


def test_a_buffer_fits_the_parameters_it_was_made_for_only():
    params = [torch.zeros(2, 2), torch.zeros(3)]
    items = [Item(i, param.numel(), 4, "k") for i, param in enumerate(params)]
    (bucket,) = plan_buckets(items, cap_bytes=2**20, order=[0, 1])
    buffer = buffer_of(bucket, params)
    assert buffer.fits([torch.ones(2, 2), torch.ones(3)])
    assert not buffer.fits([torch.ones(2, 2).double(), torch.ones(3)])
    assert not buffer.fits([torch.ones(2, 2), torch.ones(3, 1)])


def test_views_can_be_gradients():
    param = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (bucket,) = plan_buckets([Item(0, param.numel(), 4, "k")], cap_bytes=1)
    buffer = buffer_of(bucket, [param])
    param.grad = buffer.views[0]
    (param * 2).sum().backward()
    assert param.grad is buffer.views[0]
    assert torch.equal(buffer.flat[: param.numel()], torch.full((param.numel(),), 2.0))


def test_parameters_without_a_layout_of_their_own_get_a_contiguous_view():
    expanded = torch.zeros(3, 1).expand(3, 4)
    gappy = torch.zeros(4, 6)[:, ::2]
    items = [Item(0, 12, 4, "k"), Item(1, 12, 4, "k")]
    (bucket,) = plan_buckets(items, cap_bytes=2**20, order=[0, 1])
    assert all(view.is_contiguous() for view in buffer_of(bucket, [expanded, gappy]).views)
