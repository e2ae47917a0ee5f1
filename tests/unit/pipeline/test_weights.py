"""Versions of weights: what a forward has read is there for its backward, and no more than that."""

from __future__ import annotations

import torch
from torch import nn

from mpisgd.pipeline.weights import SingleVersion, StashedVersions


def step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return update


def test_a_backward_sees_the_weights_of_its_forward_after_updates():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    weights, x = StashedVersions(module), torch.randn(2, 3, dtype=torch.float64)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    old = weights.call(0, x).sum()
    weights.call(0, x).sum().backward()
    weights.collect_gradients()
    weights.update(1, 0, step(module))
    assert not torch.equal(before["0.weight"], module[0].weight)
    old.backward()
    weights.collect_gradients()
    leaves = {name: tensor.requires_grad_() for name, tensor in before.items()}
    expected = torch.func.functional_call(module, leaves, (x,)).sum()
    for (name, param), gradient in zip(
        module.named_parameters(), torch.autograd.grad(expected, list(leaves.values())), strict=True
    ):
        assert torch.equal(param.grad, gradient), name
    # The next forward of version 0 and one of version 1 differ.
    assert not torch.equal(weights.call(0, x), weights.call(1, x))


def test_versions_that_nobody_reads_any_more_go_before_the_copy():
    module = nn.Linear(2, 2)
    weights = StashedVersions(module)
    for version in range(1, 6):
        weights.update(version, max(0, version - 2), step(module))
    assert weights.most_held == 3
    assert sorted(weights._held) == [3, 4, 5]
    assert weights._held[5]["weight"].data_ptr() == module.weight.data_ptr()
    assert weights._held[4]["weight"].data_ptr() != module.weight.data_ptr()


def test_without_older_readers_the_parameters_stay_where_they_are():
    module = nn.Linear(2, 2)
    for weights in (StashedVersions(module), SingleVersion(module)):
        place = module.weight.data_ptr()
        weights.update(1, 1, step(module))
        assert module.weight.data_ptr() == place
        assert weights.most_held == 1
        weights.restart()


def test_frozen_parameters_are_never_copied():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    weights, place = StashedVersions(module), module.bias.data_ptr()
    weights.update(1, 0, step(module))
    assert module.bias.data_ptr() == place
