"""What goes into a checkpoint comes out the same, and what could not be is named."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpisgd.checkpoint.serialization import decode, encode, tensor_names


def through(value: Any) -> Any:
    """What is left of a value after it was written and read."""
    encoded = encode({"it": value})
    assert encoded.problems == []
    return decode(json.loads(json.dumps(encoded.tree["it"], allow_nan=False)), encoded.tensors)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_equal_and_of_the_same_types(value):
    assert repr(through(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        ["tensor", "it"],  # looks like our own notation
        {"tensor": "it", "list": ["dict"]},
        (),
        {(1, "a"): {3.5: None}},
        float("inf"),
        1 + 2j,
        {1, 2},
        frozenset("ab"),
        collections.OrderedDict(b=1, a=2),
        collections.Counter({3: 1, 5: 2}),
        collections.deque([1, 2], maxlen=3),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
    ],
    ids=str,
)
def test_every_kind_of_value_comes_back(value):
    found = through(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_comes_back():
    assert math.isnan(through([float("nan")])[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = through({"deep": [tensor, nn.Parameter(torch.ones(2))]})["deep"]
    assert torch.equal(found[0], tensor)
    assert torch.equal(found[1], torch.ones(2))


def test_arrays_and_their_scalars_come_back():
    array = np.arange(6.0).reshape(2, 3)[:, ::-1]
    found = through({"array": array, "scalar": np.float32(0.1)})
    assert np.array_equal(found["array"], array)
    assert found["scalar"] == np.float32(0.1)
    assert type(found["scalar"]) is np.float32


def test_a_module_keeps_the_versions_of_its_parts():
    state = nn.BatchNorm1d(3).state_dict()
    assert through(state)._metadata == state._metadata


def test_tied_weights_are_kept_once_and_names_are_readable():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    encoded = encode({"model": model.state_dict(), "other": {"model.0": torch.ones(1)}})
    assert list(encoded.tensors) == ["model.0.weight", "other.model.0"]
    found = decode(encoded.tree["model"], encoded.tensors)
    assert torch.equal(found["1.weight"], model[0].weight)


def test_names_with_dots_do_not_meet():
    encoded = encode({"x": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}})
    assert len(encoded.tensors) == 2
    assert set(tensor_names(encoded.tree["x"])) == set(encoded.tensors)
    assert decode(encoded.tree["x"], encoded.tensors)["a"]["b"] == 1


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: 0, "it.deep.1 is a function"),
        (Custom(), "it.deep.1 is a test_serialization.Custom"),
        (nn.Linear(1, 1), "it.deep.1 is a torch.nn.modules.linear.Linear"),
        (torch.eye(2).to_sparse(), "it.deep.1 has layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), "it.deep.1 is a Tensor on meta"),
        (np.array([Custom()]), "it.deep.1 is an array of object"),
        (np.datetime64("2026-01-01"), "it.deep.1 is an array of datetime64"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value, said):
    (problem,) = encode({"it": {"deep": [1, value]}}).problems
    assert problem.startswith(said)
