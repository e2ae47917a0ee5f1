"""What ./scripts/test_suites makes of what ranks have written, and of what is known to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_suites
from jobs import Outcome, blame_the_end, join, read
from test_suites import Suite


def suite(**changes) -> Suite:
    found = {"packages": [], "ranks": [2], "limit_s": 1.0, "slow": [], "fails": {}, "left_out": {}}
    return Suite("some", "for this test", **{**found, **changes})


def written(folder: Path, rank: int, *lines: tuple[str, ...]) -> Path:
    """A rank's file: of a test "started", or how it has ended and why."""
    file = folder / f"rank-{rank}.jsonl"
    with file.open("w") as out:
        for test, outcome, *reason in lines:
            more = {} if outcome == "started" else {"reason": "".join(reason), "seconds": 1.5}
            print(json.dumps({"test": test, "outcome": outcome, **more}), file=out)
    return file


def test_a_test_has_the_most_severe_outcome_of_all_ranks(tmp_path):
    reports = [
        read(written(tmp_path, 0, ("a", "passed"), ("b", "skipped", "no GPU"), ("c", "passed"))),
        read(written(tmp_path, 1, ("a", "passed"), ("b", "skipped", "no GPU"), ("c", "failed", "wrong"))),
    ]
    assert join("abcd", reports, "exit code 9") == [
        Outcome("a", "passed", "", 1.5),
        Outcome("b", "left out", "no GPU", 1.5),
        Outcome("c", "failed", "wrong", 1.5),  # d has not started: it is for the next job
    ]


def test_a_test_that_does_not_end_on_a_rank_has_ended_the_job(tmp_path):
    reports = [
        read(written(tmp_path, 0, ("a", "passed"), ("b", "started"))),
        read(written(tmp_path, 1, ("a", "started"))),
    ]
    first, second = join("ab", reports, "exit code 9")
    assert (first.outcome, first.reason) == ("failed", "the job has ended in it: exit code 9")
    assert (second.outcome, second.reason) == ("failed", "the job has ended in it: exit code 9")


def test_a_job_that_ends_badly_after_its_last_test_is_told():
    passed = [Outcome("a", "passed"), Outcome("b", "passed")]
    failed = [Outcome("a", "passed"), Outcome("b", "failed", "wrong")]
    assert blame_the_end(passed, "exit code 0") == passed
    assert blame_the_end(failed, "exit code 9") == failed
    assert blame_the_end(passed, "exit code 1")[1] == Outcome("b", "failed", "after it: exit code 1")


def test_reasons_may_hold_at_some_numbers_of_ranks():
    some = suite(fails={"always": "why", "at two": {"ranks": [2], "reason": "why"}})
    assert [some.reason("fails", "always", size) for size in (2, 3)] == ["why", "why"]
    assert [some.reason("fails", "at two", size) for size in (2, 3)] == ["why", ""]
    assert some.reason("fails", "other", 2) == some.reason("left_out", "always", 2) == ""


@pytest.mark.parametrize(
    ("outcome", "known", "told"),
    [
        ("passed", False, False),
        ("failed", True, False),
        ("left out", True, False),
        ("failed", False, True),
        ("passed", True, True),
    ],
)
def test_what_contradicts_the_list_is_told(outcome, known, told):
    some = suite(fails={"a": "why"} if known else {})
    assert bool(list(test_suites.unexpected(some, 2, [Outcome("a", outcome)]))) is told


def test_a_name_that_the_suite_does_not_have_is_told():
    some = suite(fails={"a": "why"}, left_out={"b": "why"}, slow=["c"])
    assert not list(test_suites.stale(some, "abcd"))
    assert list(test_suites.stale(some, "ac")) == ["there is no test b, which suites.toml names"]


def test_the_list_is_well_formed():
    for name, one in test_suites.read_suites().items():
        assert one.name == name in test_suites.PROGRAMS
        assert (test_suites.SUITES / test_suites.PROGRAMS[name]).exists()
        assert not set(one.fails) & set(one.left_out)
        for kind in ("fails", "left_out"):
            for test in getattr(one, kind):
                assert any(one.reason(kind, test, size) for size in one.ranks), test
