"""A table of names is matched to a model, and refused where it does not fit."""

from __future__ import annotations

import pytest
from torch import nn

from mpisgd import InvalidArgument
from mpisgd.layouts.dimension_names import resolve_names
from mpisgd.layouts.rules import Rule
from mpisgd.layouts.search import legal_layouts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


def model() -> nn.Module:
    whole = nn.Module()
    whole.embedding = nn.Embedding(6, 4)
    whole.blocks = nn.ModuleList([Block(), Block()])
    whole.output = nn.Linear(4, 6, bias=False)
    whole.register_buffer("scale", whole.output.weight.detach().new_ones(4))
    return whole


NAMES = {
    "embedding.weight": ("vocab", "model"),
    "blocks.*": ("batch", "model"),
    "blocks.*.up.weight": ("hidden", "model"),
    "blocks.1.down.weight": ("model", None),
    "blocks.*.down.weight": ("model", "hidden"),
    "output.weight": ("vocab", "model"),
    "scale": ("model",),
}


def test_a_star_stands_for_one_part_and_the_first_entry_that_fits_counts():
    found = resolve_names(model(), NAMES, ("batch",), ("batch", "vocab"))
    assert found.tensors == {
        "embedding.weight": ("vocab", "model"),
        "blocks.0.up.weight": ("hidden", "model"),
        "blocks.1.up.weight": ("hidden", "model"),
        "blocks.0.down.weight": ("model", "hidden"),
        "blocks.1.down.weight": ("model", None),
        "output.weight": ("vocab", "model"),
        "scale": ("model",),
    }
    assert found.modules == {
        "blocks.0": ("batch", "model"),
        "blocks.1": ("batch", "model"),
        "": ("batch", "vocab"),
    }
    assert found.inputs == (("batch",),)
    assert sorted(found.names) == ["batch", "hidden", "model", "vocab"]
    assert found.sizes == {"vocab": 6, "model": 4, "hidden": 8}


def test_a_tied_parameter_needs_one_entry_and_takes_no_two():
    tied = model()
    tied.output.weight = tied.embedding.weight
    found = resolve_names(tied, {"output.weight": ("vocab", "model")}, (), None)
    assert set(found.tensors) == {"embedding.weight", "output.weight"}
    both = {"output.weight": ("vocab", "model"), "embedding.weight": ("words", "model")}
    with pytest.raises(InvalidArgument, match=r"embedding.weight and output.weight are one tensor"):
        resolve_names(tied, both, (), None)


@pytest.mark.parametrize(
    ("names", "inputs", "said"),
    [
        ({"embeding.weight": ("vocab", "model")}, (), "the nearest is 'embedding.weight'"),
        ({"blocks.*.*": ("a",), "blocks.*.up.wait": ("b",)}, (), "'blocks.*.up.wait', which is no parameter"),
        ({"output.weight": ("vocab",)}, (), "output.weight has 2 dimensions, [6, 4], and 1 names, [vocab]"),
        ({"output.weight": ("model", "model")}, (), Rule.ONE_SIZE.value),
        ({"output.weight": "vocab"}, (), "output.weight has 'vocab'; expected names"),
        ({"output.weight": ("vocab", 3)}, (), "expected names"),
        ({"": ("vocab",)}, (), "names has the key ''"),
        ({}, ("batch", 2), "expected names"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(names, inputs, said):
    with pytest.raises(InvalidArgument) as caught:
        resolve_names(model(), names, inputs, None)
    assert said in str(caught.value)


def test_legal_layouts_are_those_that_the_rules_allow():
    names = {"up.weight": ("hidden", "model"), "down.weight": ("model", "hidden")}
    found = [layout.rules_text for layout in legal_layouts(Block(), names, "a:2", inputs=("batch", "model"))]
    # batch and hidden may share the axis, model is in one tensor with each of them.
    assert sorted(found) == ["", "batch:a", "batch:a; hidden:a", "hidden:a", "model:a"]
    found = [layout.rules_text for layout in legal_layouts(Block(), names, "a:8", inputs=("batch", "model"))]
    assert sorted(found) == ["", "batch:a", "batch:a; hidden:a", "hidden:a"]  # 8 does not divide model


def test_axes_of_one_length_are_taken_once():
    names = {"up.weight": ("hidden", "model")}
    alike = {layout.rules_text for layout in legal_layouts(Block(), names, "a:2, b:2")}
    assert alike == {"", "hidden:a", "model:a", "hidden:a; model:b"}
    different = {layout.rules_text for layout in legal_layouts(Block(), names, "a:2, b:4")}
    assert len(different) == 7
