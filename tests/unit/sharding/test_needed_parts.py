"""What a rank needs of a tensor, and gets of it, are the elements that its pieces have."""

from __future__ import annotations

import pytest
import torch

from mpisgd.gradients.fusion_buffer import layout_of
from mpisgd.sharding.division import Member
from mpisgd.sharding.needed_parts import LoadedPart, NeededPart, elements_of

MEMBERS = [Member(3, 2, 4, 0), Member(3, 10, 5, 4)]


def empty(shape, dtype):
    return torch.full(shape, -1, dtype=dtype)


def loaded(needed, tensor):
    """What comes of a tensor, through the memory that is made for it."""
    buffer = needed.buffer(tensor.shape, tensor.dtype, empty)
    for mine, found in zip(needed.in_buffer(buffer), needed.of(tensor), strict=True):
        mine.copy_(found)
    return buffer


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_part_has_its_runs_in_the_order_of_memory(channels_last):
    param = torch.zeros(2, 3, 2, 2)
    if channels_last:
        param = param.contiguous(memory_format=torch.channels_last)
    layout = layout_of(param)
    saved = torch.arange(24.0).view(2, 3, 2, 2)  # as in a file, in the order of its elements
    part = loaded(NeededPart.by_members(layout, MEMBERS), saved)
    assert isinstance(part, LoadedPart)
    assert part.shape == saved.shape
    assert part.elements.numel() == 9
    for first, numel in [(2, 4), (3, 2), (10, 5), (14, 1)]:
        assert torch.equal(part.cut(first, numel), elements_of(saved, layout, first, numel))


def test_everything_is_a_tensor_that_lies_as_the_parameter():
    param = torch.zeros(4, 3).t()
    saved = torch.arange(12.0).view(3, 4)
    part = loaded(NeededPart(layout_of(param), ((0, 12),)), saved)
    assert torch.equal(part.whole(), saved)
    assert part.whole().stride() == param.stride()


def test_of_a_tensor_of_another_shape_everything_is_needed():
    needed = NeededPart.by_members(layout_of(torch.zeros(5, 5)), MEMBERS)
    saved = torch.arange(7)
    assert torch.equal(loaded(needed, saved), saved)


def test_who_has_no_part_of_a_parameter_needs_nothing():
    needed = NeededPart(layout_of(torch.zeros(5, 5)), ())
    for shape in [(5, 5), (7,)]:
        assert needed.of(torch.zeros(shape)) == []
        assert loaded(needed, torch.zeros(shape)).elements.numel() == 0
