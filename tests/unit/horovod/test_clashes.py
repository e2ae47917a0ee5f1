"""What all wait for in different operations is settled when it lasts, once."""

from __future__ import annotations

from mpisgd.horovod.engine.clashes import PATIENCE_S, SETTLE, Clashes

CLASH, OTHER = (0, "x"), (2, "y")


def test_a_clash_that_lasts_is_settled_once():
    known = Clashes()
    assert known.look([], 100.0) == []
    assert not known.any()
    assert known.look([CLASH], 101.0) == known.look([CLASH, OTHER], 101.0 + PATIENCE_S / 2) == []
    assert known.any()
    (entry,) = known.look([CLASH, OTHER], 101.0 + PATIENCE_S)
    assert (entry.request.kind, entry.request.set_id, entry.request.op) == (SETTLE, 0, "x")
    assert known.look([CLASH], 102.0 + PATIENCE_S) == []


def test_one_that_comes_back_is_new():
    known = Clashes()
    known.look([CLASH], 0.0)
    known.look([], 1.0)
    assert known.look([CLASH], PATIENCE_S) == []
    assert len(known.look([CLASH], 2 * PATIENCE_S)) == 1
