"""Where gradients and state are: only what is drawn may follow."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mpisgd.sharding import places as drawings
from mpisgd.sharding.places import GradientPlace, StatePlace

GRADIENTS = {
    "LOCAL": {"LOCAL", "DEFERRED", "OWNED"},
    "DEFERRED": {"LOCAL", "OWNED"},
    "OWNED": {"LOCAL", "USED"},
    "USED": {"LOCAL"},
}
STATE = {"WHOLE": {"WHOLE", "PIECES"}, "PIECES": {"WHOLE", "PIECES", "STEP"}, "STEP": {"PIECES"}}


@pytest.mark.parametrize(("places", "drawn"), [(GradientPlace, GRADIENTS), (StatePlace, STATE)])
def test_only_what_is_drawn_may_follow(places, drawn):
    for one, other in itertools.product(places, places):
        if other.name in drawn[one.name]:
            assert one.to(other) is other
        else:
            with pytest.raises(AssertionError, match="next"):
                one.to(other)


@pytest.mark.parametrize("place", [*GradientPlace, *StatePlace], ids=lambda place: place.name)
def test_each_place_is_drawn_and_explained_in_the_documentation_too(place):
    page = Path(__file__).parents[3] / "docs" / "internals" / "one-step.md"
    for text in (drawings.__doc__, page.read_text()):
        lines = [line.strip() for line in text.splitlines() if place.name in line.split()]
        assert any("->" in line for line in lines), "it is not drawn"
        assert any(line.startswith(place.name) and "->" not in line for line in lines), "nothing explains it"
