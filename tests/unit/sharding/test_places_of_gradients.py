"""Where gradients and state are: only what is drawn may follow."""

from __future__ import annotations

import itertools

import pytest

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
