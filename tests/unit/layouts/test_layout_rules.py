"""Layouts are read, print what they were read from, and refuse what breaks a rule by its name."""

from __future__ import annotations

import pytest

from mpisgd import InvalidArgument
from mpisgd.layouts.layout import MeshLayout
from mpisgd.layouts.rules import Rule, parse_mesh, parse_rules


def layout(rules: str, mesh: str = "dp:2, tp:4") -> MeshLayout:
    return MeshLayout(parse_rules(rules), parse_mesh(mesh))


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("batch:dp; hidden:tp; vocab:tp", "dp:2, tp:4"),
        ("vocab:tp,hidden : tp;batch:dp;", "dp:2;tp:4"),
        ({"hidden": "tp", "vocab": "tp", "batch": "dp"}, {"dp": 2, "tp": 4}),
    ],
)
def test_layout_is_read_in_any_order_and_form(rules, mesh):
    found = MeshLayout(parse_rules(rules), parse_mesh(mesh))
    assert found == layout("batch:dp; hidden:tp; vocab:tp")
    assert str(found) == "'batch:dp; hidden:tp; vocab:tp' on 'dp:2, tp:4'"
    assert layout(found.rules_text, found.mesh_text) == found
    assert found.num_ranks == 8
    assert len({found, layout("batch:dp; hidden:tp; vocab:tp")}) == 1


def test_the_order_of_axes_counts():
    assert layout("", "dp:2, tp:4") != layout("", "tp:4, dp:2")


@pytest.mark.parametrize(
    ("dims", "divided", "parts"),
    [
        (("batch", "length", "model"), {"dp": 0}, 2),
        (("vocab", "model"), {"tp": 0}, 4),
        (("batch", "length", "vocab"), {"dp": 0, "tp": 2}, 8),
        ((None, "model"), {}, 1),
        ((), {}, 1),
    ],
)
def test_a_tensor_is_divided_along_the_axes_of_its_dimensions(dims, divided, parts):
    found = layout("batch:dp; hidden:tp; vocab:tp")
    assert found.divided(dims) == divided
    assert found.part_of(dims) == parts


@pytest.mark.parametrize(
    ("rules", "mesh", "said"),
    [
        ("batch:dp; batch:tp", "dp:2, tp:4", Rule.ONE_AXIS.value),
        ("batch:pp", "dp:2, tp:4", Rule.KNOWN_AXIS.value),
        ("batch", "dp:2", "'batch' is not of the form name:value"),
        (":dp", "dp:2", "':dp' is not of the form"),
        ("batch:dp", "dp", "'dp' is not of the form"),
        ("batch:dp", "dp:two", "the length of dp is 'two'"),
        ("batch:dp", "dp:0", "axis dp has the length 0"),
        ("batch:dp", "dp:2, dp:2", "names an axis twice"),
        ("", "", "the mesh has no axis"),
        (None, "dp:2", "rules=None"),
        ("", {"dp": 2.5}, "axis dp has the length 2.5"),
    ],
)
def test_what_breaks_a_rule_is_refused_at_construction(rules, mesh, said):
    with pytest.raises(InvalidArgument) as caught:
        MeshLayout(parse_rules(rules), parse_mesh(mesh))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("dims", "shape", "rule"),
    [
        (("vocab", "hidden"), (8, 8), Rule.ONE_DIMENSION),
        (("hidden", "hidden"), (8, 8), Rule.ONE_DIMENSION),
        (("batch", "hidden"), (3, 8), Rule.EVEN),
        (("batch", "hidden"), (2, 6), Rule.EVEN),
    ],
)
def test_a_tensor_that_cannot_be_divided_so_is_refused_with_the_rule_named(dims, shape, rule):
    found = layout("batch:dp; hidden:tp; vocab:tp")
    with pytest.raises(InvalidArgument) as caught:
        found.check("embedding.weight", dims, shape)
    for said in ("embedding.weight", str(found), rule.value):
        assert said in str(caught.value)


def test_unknown_dimensions_and_other_numbers_of_ranks_are_refused():
    found = layout("batch:dp; hiden:tp")
    with pytest.raises(
        InvalidArgument, match=f"hiden:tp, but there are batch, hidden; .*{Rule.KNOWN_DIMENSION.value}"
    ):
        found.check_known(["hidden", "batch"])
    with pytest.raises(InvalidArgument, match=f"it has 8, the job 6; .*{Rule.ALL_RANKS.value}"):
        found.check_ranks(6)
    found.check_ranks(8)
