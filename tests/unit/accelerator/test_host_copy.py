"""Copies of nested state: equal, apart from their source, and in the same memory again."""

from __future__ import annotations

import collections

import torch

from mpisgd.accelerator.host_copy import copy_tree


def nested():
    return {
        "weights": [torch.arange(6.0).view(2, 3), torch.tensor(2, dtype=torch.int8)],
        "state": {0: {"step": 3, "momentum": torch.ones(4, dtype=torch.bfloat16)}},
        "betas": (0.9, 0.99),
        "order": [3, 1, 2],
    }


def test_a_copy_is_equal_and_shares_nothing():
    source = nested()
    copied = copy_tree(source)
    source["weights"][0].add_(1)
    source["order"].append(9)
    source["state"][0]["step"] = 4
    expected = nested()
    assert torch.equal(copied["weights"][0], expected["weights"][0])
    assert copied["weights"][1].dtype == torch.int8
    assert copied["order"] == [3, 1, 2]
    assert copied["betas"] == (0.9, 0.99)
    assert copied["state"][0]["step"] == 3
    assert torch.equal(copied["state"][0]["momentum"], torch.ones(4, dtype=torch.bfloat16))


def test_memory_of_an_older_copy_is_used_again_where_it_fits():
    first = copy_tree(nested())
    pointers = [first["weights"][0].data_ptr(), first["state"][0]["momentum"].data_ptr()]
    changed = nested()
    changed["weights"][0].mul_(2)
    second = copy_tree(changed, first)
    assert [second["weights"][0].data_ptr(), second["state"][0]["momentum"].data_ptr()] == pointers
    assert torch.equal(second["weights"][0], changed["weights"][0])


def test_another_shape_or_dtype_gets_memory_of_its_own():
    kept = copy_tree([torch.zeros(3)])
    longer, other = copy_tree([torch.ones(4)], kept), copy_tree([torch.ones(3).double()], kept)
    assert longer[0].shape == (4,)
    assert other[0].dtype == torch.float64
    assert torch.equal(kept[0], torch.zeros(3))


def test_strided_and_trained_tensors_are_copied_without_their_history():
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    copied = copy_tree(weight)
    assert torch.equal(copied, weight.detach())
    assert not copied.requires_grad


def test_ordered_dicts_stay_what_they_are():
    module = torch.nn.BatchNorm1d(3)
    copied = copy_tree(module.state_dict())
    assert isinstance(copied, collections.OrderedDict)
    assert copied._metadata == module.state_dict()._metadata
    module.weight.data.fill_(7)
    assert torch.equal(copied["weight"], torch.ones(3))
