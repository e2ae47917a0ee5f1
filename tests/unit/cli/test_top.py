"""The rows of `mpisgd top`: steps, memory, and for whom a rank waits."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from mpisgd.monitor.mailbox_pages import Steps
from mpisgd.monitor.rank_state import STOPPED, WAITS, RankState, Wait, group_key
from mpisgd.tools.cli.top import HEADINGS, Usage, as_lines, cells_of, table_of

SUM = Wait(
    "all_reduce", "world", (), (0, 1, 2), 7, timeout_s=60.0, waited_s=3.25, is_main=True, site="t.py:4"
)
STEPS = Steps(1234, 10**9, 4 * 10**7)
USAGE = Usage(300 * 2**20, 90 * 2**20, 0.97)


def state(rank: int, *, waits: bool, begun: int, **more) -> RankState:
    about = {"state": WAITS, "waits": (SUM,)} if waits else {}
    return RankState(rank, "here", 100 + rank, num_begun={group_key((0, 1, 2), 0): begun}, **about, **more)


def cells(one: RankState, states: list[RankState], steps: Steps = STEPS) -> list[str]:
    return list(cells_of(one, states, steps, USAGE, 3 * 10**9))


def test_who_waits_is_said_for_whom_and_how_long():
    states = [state(0, waits=True, begun=7), state(1, waits=False, begun=6), state(2, waits=True, begun=7)]
    row = cells(states[0], states)
    assert row[:-1] == ["0", "100", "1,234", "25", "2.0 s ago", "300 MiB", "90 MiB", "97%"]
    assert row[-1] == "waits for rank 1: all_reduce, t.py:4 (3 s)"
    assert cells(states[1], states)[-1] == "runs"


def test_a_rank_that_is_stopped_is_told_as_it_was_seen():
    stopped = RankState(1, "here", 101, STOPPED, note="its process is stopped by a signal")
    assert cells(stopped, [stopped])[-1] == "its process is stopped by a signal (process 101)"


def test_ranks_of_other_hosts_are_named_where_nobody_here_is_missing():
    here = [state(0, waits=True, begun=7), state(1, waits=True, begun=7)]
    assert "waits for rank 2 on other hosts: all_reduce" in cells(here[0], here)[-1]
    here[1] = state(1, waits=False, begun=6)
    assert "waits for rank 1: all_reduce" in cells(here[0], here)[-1]


def test_before_the_first_steps_there_is_no_rate():
    one = state(0, waits=False, begun=0, device_bytes=2**30)
    assert cells(one, [one], Steps(0, 0, 0))[2:6] == ["-", "-", "-", "300 MiB + 1 GiB GPU"]
    assert cells(one, [one], Steps(1, 10**9, 0))[2:5] == ["1", "-", "2.0 s ago"]


def test_columns_stand_below_their_headings():
    rows = [
        ("0", "100", "1,234", "25", "2.0 s ago", "300 MiB", "90 MiB", "97%", "waits"),
        ("1", *[""] * 7, "runs"),
    ]
    lines = as_lines(rows, 120)
    assert [line.rstrip() for line in lines] == lines
    assert {line.index(last) for line, last in zip(lines, (HEADINGS[-1], "waits", "runs"), strict=True)} == {
        lines[0].index(HEADINGS[-1])
    }


def test_what_looks_like_markup_is_shown_as_it_is():
    rows = [("0", "1", "2", "3", "4", "5", "6", "7", "waits: shape=[1016]"), (*"12345678", "runs")]
    console = Console(file=StringIO(), width=160)
    console.print(table_of("node1: 2 ranks: python [x].py", rows, 160))
    text = console.file.getvalue()
    assert "python [x].py" in text
    assert "shape=[1016]" in text
    assert all(heading in text for heading in HEADINGS)


def test_a_rank_has_one_line_of_100_columns_and_rate_0_where_it_stands():
    what = "gradients(op=AVG, dtype=float32, shape=[24], 1 bucket(s), step 51, reduction 0, ...)"
    wait = replace(SUM, what=what, site="/home/me/hang.py:6 in train")
    states = [
        replace(state(0, waits=True, begun=7), waits=(wait,)),
        state(1, waits=False, begun=6),
        state(2, waits=False, begun=7),
    ]
    rows = [cells_of(one, states, STEPS, USAGE, 60 * 10**9) for one in states]
    lines = as_lines(rows, 100)
    assert lines[0].split() == ["rank", "pid", "step", "steps/s", "memory", "cpu", "what", "it", "does"]
    assert lines[1].endswith("97%  waits for rank 1: gradients, step 51, hang.py:6 (3 s)")
    assert lines[1].split()[3] == "0"
    assert max(map(len, lines)) <= 100
    console = Console(file=StringIO(), width=100)
    console.print(table_of("node1: 3 ranks: python hang.py", rows, 100))
    assert len(console.file.getvalue().splitlines()) == 1 + 1 + 3
