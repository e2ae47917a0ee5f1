"""What a timeline says in numbers, and the command that prints them."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from mpisgd.errors import JobError
from mpisgd.timeline.files import merge
from mpisgd.tools.cli.trace import trace
from mpisgd.tools.timeline.summary import summarise


def beginning(rank: int, **clock: float) -> list[dict]:
    about = {"rank": rank, "error_us": 0.0, **clock}
    return [
        {"name": "mpisgd", "ph": "M", "pid": rank, "tid": 0, "args": about},
        {
            "name": "thread_name",
            "ph": "M",
            "pid": rank,
            "tid": 1,
            "args": {"name": "group world", "ranks": [0, 1]},
        },
        {
            "name": "thread_name",
            "ph": "M",
            "pid": rank,
            "tid": 2,
            "args": {"name": "MainThread", "ranks": []},
        },
    ]


def operation(rank: int, number: int, at: float, wait: float, move: float, **more) -> dict:
    args = {
        "bytes": 1000,
        "transport": "node",
        "number": number,
        "arrived_us": 0.0,
        "wait_us": wait,
        "what": f"op {number}",
    }
    args |= {"blocking": True, **more}
    cat = args.pop("cat", "collective")
    return {
        "name": "all_reduce",
        "ph": "X",
        "pid": rank,
        "tid": 1,
        "cat": cat,
        "ts": at,
        "dur": wait + move,
        "args": args,
    }


def blocked(rank: int, at: float, dur: float) -> dict:
    return {
        "name": "wait",
        "ph": "X",
        "pid": rank,
        "tid": 2,
        "cat": "blocked",
        "ts": at,
        "dur": dur,
        "args": {},
    }


def test_operations_are_added_up_without_the_time_for_others():
    events = beginning(0) + beginning(1)
    events += [operation(0, 1, 0, 90, 10), operation(1, 1, 90, 0, 10)]
    events += [operation(0, 2, 200, 0, 30), operation(1, 2, 170, 30, 30)]
    (row,) = summarise(events).rows
    assert row[:4] == ("all_reduce", "group world", "node", 2)
    assert (row.total_us, row.wait_us, row.nbytes) == (40.0, 60.0, 2000.0)
    assert row.median_us == 20.0
    assert row.bytes_per_s == pytest.approx(2000 / 40e-6)


def test_the_last_one_is_told_by_how_much_it_was_late():
    events = [*beginning(0), *beginning(1), *beginning(2)]
    for number, last in enumerate([2, 2, 0, 2]):
        arrivals = {0: 1000.0 * number, 1: 1000.0 * number + 5, 2: 1000.0 * number}
        arrivals[last] += 105 + 10 * number
        events += [operation(rank, number, at, 0, 10) for rank, at in arrivals.items()]
    summary = summarise(events)
    assert summary.num_common == 4
    assert [(late.rank, late.times) for late in summary.late] == [(2, 3), (0, 1)]
    assert summary.late[0][2:] == (100 + 110 + 130, 110, 130, "op 3")
    assert summary.late[1][2:] == (120, 120, 120, "op 2")


def test_operations_that_waited_for_one_rank_together_count_once():
    events = beginning(0) + beginning(1)
    for number in range(3):
        events += [operation(0, number, number, 0, 1), operation(1, number, 100 + number, 0, 1)]
    assert summarise(events).late[0][:3] == (1, 3, 102)


def test_what_the_program_waits_for_is_not_hidden():
    events = beginning(0)
    events += [operation(0, 1, 0, 0, 100, blocking=False), blocked(0, 70, 50)]  # 70 of 100 hidden
    events += [operation(0, 2, 200, 0, 100, blocking=True)]
    events += [operation(0, 3, 400, 0, 100, blocking=False, cat="carried")]
    events += [operation(0, 4, 450, 0, 100, blocking=False)]  # together with the one before 150
    (overlap,) = summarise(events).overlaps
    assert overlap == (0, 350.0, 220.0)
    assert overlap.share == pytest.approx(220 / 350)


def test_negotiated_tensors_are_matched_by_their_number():
    events = [*beginning(0), *beginning(1)]
    for rank, late in ((0, 0.0), (1, 40.0)):
        args = {"operation": "allreduce", "number": 7, "bytes": 12, "process_set": 0, "transport": "node"}
        args |= {"negotiate_us": 50.0, "queue_us": 1.0, "run_us": 9.0, "late_us": late}
        events.append(
            {"name": "g", "ph": "b", "pid": rank, "tid": 0, "cat": "horovod", "ts": 0.0, "args": args}
        )
    summary = summarise(events)
    assert summary.rows[0][:4] == ("allreduce", "hvd, set 0", "node", 1)
    assert summary.late == [(1, 1, 40.0, 40.0, 40.0, "allreduce 'g'")]


def run(*args: str):
    app = typer.Typer()
    app.command()(trace)
    return CliRunner().invoke(app, args)


def test_the_command_merges_and_prints(tmp_path):
    for rank in range(2):
        name = tmp_path / "parts" / f"run.rank{rank}.json"
        name.parent.mkdir(exist_ok=True)
        merge([*beginning(rank), operation(rank, 1, 100 * rank, 0, 10)], name)
    done = run(str(tmp_path / "parts"), "--out", str(tmp_path / "whole.json"))
    assert done.exit_code == 0, done.output
    assert "all_reduce" in done.stdout
    assert "100 us" in done.stdout
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert {event["pid"] for event in whole if event["ph"] == "X"} == {0, 1}
    assert run(str(tmp_path / "whole.json")).stdout == done.stdout
    twice = run(str(tmp_path / "parts"), str(tmp_path / "whole.json"))
    assert isinstance(twice.exception, JobError)
    assert "rank 0 is in" in str(twice.exception)


def test_nothing_to_read_is_an_error(tmp_path):
    assert isinstance(run(str(tmp_path)).exception, JobError)
    assert isinstance(run(str(tmp_path / "missing.json")).exception, JobError)
