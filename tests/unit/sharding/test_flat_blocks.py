"""Small parameters lie side by side after the move, with the values and strides that they had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.sharding.division import Item, divide
from mpisgd.sharding.flat_blocks import is_movable, move_to_blocks

JOINS, STAYS = (0, "float32", False), (0, "float32", True)


def parameters() -> list[nn.Parameter]:
    shapes = [(3, 5), (7,), (2, 2, 3), (), (17,), (4, 4)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    params[-1].data = torch.randn(4, 4).t()
    return params


def test_values_and_strides_stay_and_pieces_are_slices():
    params = parameters()
    before = [(param.detach().clone(), param.stride()) for param in params]
    items = [Item(i, p.numel(), 4, STAYS if i == 2 else JOINS) for i, p in enumerate(params)]
    place = params[2].data_ptr()
    blocks = move_to_blocks(params, items)
    assert sorted(blocks) == [0, 1, 3, 4, 5]
    assert params[2].data_ptr() == place
    for param, (value, stride) in zip(params, before, strict=True):
        assert torch.equal(param, value)
        assert param.stride() == stride
    joined = [r for of_rank in divide(items, (), 2, 2**20) for r in of_rank if len(r.members) > 1]
    assert joined
    for range_ in joined:
        part = blocks[range_.members[0].param].part(range_)
        for member in range_.members:
            first = params[member.param].data_ptr() + 4 * member.first
            assert part[member.at : member.at + member.numel].data_ptr() == first


@pytest.mark.parametrize("way", ["a second tensor", "a part of another", "shared by processes"])
def test_what_others_see_is_not_moved(way):
    param = nn.Parameter(torch.randn(6))
    assert is_movable(param)
    other = param.data if way == "a second tensor" else None
    if way == "a part of another":
        param = nn.Parameter(torch.randn(8)[:6])
    if way == "shared by processes":
        param.data.share_memory_()
    assert not is_movable(param)
    del other
