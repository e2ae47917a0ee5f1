"""Which modules are layers, how they get memory, and how their parameters are divided into chunks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument
from mpisgd.sharding.layerwise.layers import layers_of, materialize
from mpisgd.sharding.layerwise.parameter_unit import Unit


def test_children_and_what_is_in_containers_are_layers():
    model = nn.Module()
    model.embed = nn.Embedding(3, 4)
    model.act = nn.ReLU()
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.blocks = nn.ModuleList([inner, nn.TransformerEncoderLayer(4, 1)])
    model.head = nn.Linear(4, 3)
    assert layers_of(model) == [model.embed, model.blocks[0][0], model.blocks[1], model.head]
    model.scale = nn.Parameter(torch.ones(1))
    assert layers_of(model)[0] is model


def test_a_layer_on_meta_gets_memory_and_the_values_of_its_modules():
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.MultiheadAttention(5, 1))
        layer[0].weight.requires_grad_(False)
    torch.manual_seed(1)
    materialize(layer, None, {})
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.MultiheadAttention(5, 1))
    assert torch.equal(layer[0].weight, expected[0].weight)
    assert not layer[0].weight.requires_grad
    assert all(not tensor.is_meta for tensor in layer.state_dict().values())
    assert (layer[1].running_var == 1).all()


def test_a_parameter_of_two_layers_stays_one():
    with torch.device("meta"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    made = {}
    materialize(first, None, made)
    materialize(second, None, made)
    assert first.weight is second.weight


def test_own_initialization_and_its_lack():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        layer, other = Own(), Own()
    materialize(layer, lambda module: nn.init.constant_(module.weight, 2.0), {})
    assert (layer.weight == 2).all()
    with pytest.raises(InvalidArgument, match=r"Own .* pass init="):
        materialize(other, None, {})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_bytes", [256, 10**6])
def test_the_chunks_of_all_ranks_are_every_element_once(size, chunk_bytes):
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    values = [torch.randn(7, 11), torch.randn(3), images]
    seen = [torch.zeros(value.numel(), dtype=torch.int64) for value in values]
    for rank in range(size):
        params = [nn.Parameter(value.clone(memory_format=torch.preserve_format)) for value in values]
        unit = Unit("unit", params, size, rank, chunk_bytes)
        assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
        assert sum(chunk.numel for chunk in unit.chunks) == unit.part
        for chunk in unit.chunks:
            own = unit.own(unit.flat)[chunk.start : chunk.start + chunk.numel]
            for member in unit.members(chunk):
                layout = unit.layouts[member.param]
                flat = values[member.param].as_strided((layout.shape.numel(),), (1,))
                part = slice(member.first, member.first + member.numel)
                assert torch.equal(own[member.at : member.at + member.numel], flat[part])
                seen[member.param][part] += 1
    assert all((times == 1).all() for times in seen)


def test_memory_comes_and_goes_and_what_is_saved_for_backward_stays_valid():
    layer = nn.Linear(4, 3)
    unit = Unit("unit", list(layer.parameters()), 1, 0, 4096)
    values = unit.flat.clone()
    x = torch.randn(2, 4, requires_grad=True)
    weight = layer.weight.detach().clone()
    y = layer(x)
    unit.drop()
    assert layer.weight.untyped_storage().nbytes() == 0
    assert layer.weight.shape == (3, 4)
    unit.make_room()
    unit.flat.copy_(values)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3) @ weight)
