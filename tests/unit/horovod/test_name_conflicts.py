"""What all wait for in different operations is resolved when it lasts, once."""

from __future__ import annotations

from mpisgd.horovod.engine.name_conflicts import GRACE_S, RESOLVE, NameConflicts

CONFLICT, OTHER = (0, "x"), (2, "y")


def test_a_conflict_that_lasts_is_resolved_once():
    known = NameConflicts()
    assert known.check([], 100.0) == []
    assert not known.any()
    assert known.check([CONFLICT], 101.0) == known.check([CONFLICT, OTHER], 101.0 + GRACE_S / 2) == []
    assert known.any()
    (entry,) = known.check([CONFLICT, OTHER], 101.0 + GRACE_S)
    assert (entry.request.kind, entry.request.set_id, entry.request.op) == (RESOLVE, 0, "x")
    assert known.check([CONFLICT], 102.0 + GRACE_S) == []


def test_one_that_comes_back_is_new():
    known = NameConflicts()
    known.check([CONFLICT], 0.0)
    known.check([], 1.0)
    assert known.check([CONFLICT], GRACE_S) == []
    assert len(known.check([CONFLICT], 2 * GRACE_S)) == 1
