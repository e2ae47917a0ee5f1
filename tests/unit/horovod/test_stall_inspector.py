"""When the first rank speaks about what others have not submitted, and what it says."""

from __future__ import annotations

from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.settings import Settings, read_settings
from mpisgd.horovod.engine.stall_inspector import GRACE_S, NameConflicts, StallInspector, main_stack

A = Request("allreduce.a", "allreduce")
B = Request("allgather.b", "allgather")


class Said:
    """What a `StallInspector` said, and whether it ended the job."""

    def __init__(self, **settings: float) -> None:
        self.texts: list[str] = []
        self.ended = 0
        self.stalls = StallInspector(Settings(**settings), self.texts.append, self.end)  # type: ignore[arg-type]

    def end(self) -> None:
        self.ended += 1

    def look(self, at_s: float, *waiting: tuple[Request, set[int]]) -> None:
        self.stalls.check([(request, frozenset(missing)) for request, missing in waiting], at_s)


def test_it_speaks_once_an_operation_has_waited_and_again_after_as_long():
    said = Said(stall_warning_s=10.0)
    said.look(100, (A, {1, 3}))
    said.look(109, (A, {1, 3}), (B, {0}))
    assert said.texts == []
    said.look(111, (A, {3}), (B, {0}))
    (text,) = said.texts
    assert "allreduce 'a': rank 3" in text
    assert "'b'" not in text
    said.look(112, (A, {3}), (B, {0}))
    assert len(said.texts) == 1
    said.look(120, (A, {3}), (B, {0, 2}))
    assert "allgather 'b': ranks 0, 2" in said.texts[1]
    assert "'a'" not in said.texts[1]
    said.look(122, (A, {3}), (B, {0, 2}))
    assert "allreduce 'a': rank 3" in said.texts[2]


def test_what_has_run_meanwhile_begins_anew():
    said = Said(stall_warning_s=10.0)
    said.look(0, (A, {1}))
    said.look(9)
    said.look(18, (A, {1}))
    assert said.texts == []


def test_stacks_are_asked_for_before_it_speaks():
    said = Said(stall_warning_s=10.0, stall_stacks=True)
    said.look(0, (A, {1}))
    assert not said.stalls.wants_stacks
    said.look(11, (A, {1}))
    assert said.stalls.wants_stacks
    assert said.texts == []
    said.stalls.report({0: "of the one that asks", 1: 'File "train.py", line 7\n  forward()'})
    assert 'rank 1 is here meanwhile (innermost call last):\n    File "train.py", line 7' in said.texts[0]
    assert "of the one that asks" not in said.texts[0]
    assert not said.stalls.wants_stacks


def test_the_job_ends_after_its_time_and_not_before():
    said = Said(stall_warning_s=0.0, stall_end_s=30.0)
    said.look(0, (A, {1}))
    said.look(29, (A, {1}), (B, {2}))
    assert said.texts == []
    said.look(31, (A, {1}), (B, {2}))
    assert said.stalls.wants_stacks
    said.stalls.report({1: "here", 2: "there"})
    assert said.ended == 1
    assert "allreduce 'a': rank 1" in said.texts[0]
    assert "allgather 'b': rank 2" in said.texts[0]
    assert "the job ends" in said.texts[0]


def test_many_names_are_cut_short():
    said = Said(stall_warning_s=1.0)
    many = [(Request(f"allreduce.{i}", "allreduce"), {1}) for i in range(20)]
    said.look(0, *many)
    said.look(2, *many)
    assert said.texts[0].count("allreduce '") == 12
    assert "and 8 more" in said.texts[0]


def test_the_variables():
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}
    assert read_settings(env)[3:] == (5.0, 7.0, False)
    assert read_settings(env).shortest_stall_s == 5.0
    assert read_settings({**env, "MPISGD_STALL_STACKS": "1"}).stall_stacks
    assert read_settings({**env, "HOROVOD_STALL_CHECK_DISABLE": "1"}).shortest_stall_s == 0.0
    assert read_settings({}).shortest_stall_s == 60.0


def test_the_stack_is_the_main_threads():
    assert "test_the_stack_is_the_main_threads" in main_stack()


# --- names that are waited for in operations of different kinds ---------------------------------------

CONFLICT, OTHER = (0, "x"), (2, "y")


def test_a_conflict_that_lasts_is_resolved_once():
    known = NameConflicts()
    assert known.check([], 100.0) == []
    assert not known.since_s
    assert known.check([CONFLICT], 101.0) == known.check([CONFLICT, OTHER], 101.0 + GRACE_S / 2) == []
    assert known.since_s
    assert known.check([CONFLICT, OTHER], 101.0 + GRACE_S) == [CONFLICT]
    assert known.check([CONFLICT], 102.0 + GRACE_S) == []


def test_one_that_comes_back_is_new():
    known = NameConflicts()
    known.check([CONFLICT], 0.0)
    known.check([], 1.0)
    assert known.check([CONFLICT], GRACE_S) == []
    assert len(known.check([CONFLICT], 2 * GRACE_S)) == 1
