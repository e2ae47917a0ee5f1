"""The mistakes of tests/launch/programs/mistakes.py, made by ranks on several hosts."""

from __future__ import annotations

import pytest
from clusters import ROOT, run_on
from launcher import python
from mistake_reports import check_reports

PROGRAM = str(ROOT / "tests" / "launch" / "programs" / "mistakes.py")
LONG = pytest.mark.long
HOSTS = [pytest.param("1,1", marks=LONG), "2,1", pytest.param("2,2", marks=LONG)]


def check(hosts: str, *options: str) -> None:
    done = run_on(hosts, python(), PROGRAM, *options)
    check_reports(done, sum(map(int, hosts.split(","))))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", HOSTS)
def test_every_mistake_ends_in_the_right_error_on_all_ranks(hosts):
    check(hosts, "fast")


@LONG
@pytest.mark.timeout(960)
@pytest.mark.parametrize("hosts", ["1,1", "2,1", "2,2"])
def test_at_the_pace_of_a_job(hosts):
    check(hosts)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(
    ("how", "what"), [("returns", "recv"), pytest.param("exits", "all_reduce of a group", marks=LONG)]
)
def test_a_rank_that_leaves_early_ends_the_job_with_one_error(hosts, how, what):
    done = run_on(hosts, python(), PROGRAM, how, what)
    assert done.returncode not in (0, 124), done.stderr
    assert done.stderr.count("raised, the job ends:") == 1, done.stderr
    assert "shutdown" in done.stderr, done.stderr
