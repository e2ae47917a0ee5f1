"""The report's page: its numbers are the record's, and its size is bounded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from invented_runs import counter, head, operation, run, step_us
from typer.testing import CliRunner

from mpisgd.errors import InvalidArgument, JobError
from mpisgd.timeline.files import merge
from mpisgd.tools.cli.trace import trace
from mpisgd.tools.timeline.report.excerpt import KINDS, excerpt_of, typical_steps
from mpisgd.tools.timeline.report.figures import steps_of
from mpisgd.tools.timeline.report.page import data_of, html_of
from mpisgd.tools.timeline.summary import summarise

NUM_RANKS, NUM_STEPS = 8, 1000
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def events() -> list[dict]:
    return run(NUM_RANKS, NUM_STEPS)


@pytest.fixture(scope="module")
def page(events) -> str:
    return html_of(data_of(events, "run.json"))


def embedded(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_numbers_are_those_of_the_record(events, page):
    record, summary = embedded(page), summarise(events)
    assert record["ranks"] == list(range(NUM_RANKS))
    assert record["hosts"] == list("aaaabbbb")
    assert record["duration"] == round(summary.duration_us)
    assert record["steps"]["numbers"] == list(range(2, NUM_STEPS + 2))
    for rank in range(NUM_RANKS):
        times = [step_us(rank, number) for number in record["steps"]["numbers"]]
        assert record["steps"]["time"][str(rank)] == [round(time) for time in times]
        moving = [round(time / 10) for time in times]
        assert record["steps"]["communication"][str(rank)] == pytest.approx(moving, abs=1)
        division = record["division"][str(rank)]
        assert division["communication"] == pytest.approx(sum(times) / 10, abs=1)
        assert division["wait"] == pytest.approx(sum(times) / 20, abs=1)
        assert sum(division.values()) == pytest.approx(sum(times), abs=2)
        assert max(record["memory"][str(rank)]["own"]) == 1024 * (rank + 1)
    (row,) = record["operations"]
    assert row == pytest.approx(summary.rows[0]._asdict(), abs=0.5)
    assert [late["total_us"] for late in record["late"]] == [round(late.total_us) for late in summary.late]
    assert record["slowest"][0]["moving_us"] == max(
        round(e["dur"] - e["args"]["wait_us"]) for e in events if e.get("cat") == "collective"
    )
    between = {(link["source"], link["destination"]): link["nbytes"] for link in record["links"]}
    assert between["a", "b"] == between["b", "a"] == 4096


def test_its_size_is_bounded_and_it_needs_no_network(page):
    assert len(page.encode()) < 5 * MEGABYTE
    assert not re.findall(
        r"https?:|\bsrc=|\bhref=|@import|url\(", re.sub(r"<script type.*?</script>", "", page)
    )


def test_a_long_run_on_many_ranks_has_fewer_points():
    record = data_of(run(64, 1000, num_operations=0), "long")
    together = record["steps"]["together"]
    assert together > 1
    assert len(record["steps"]["time"][0]) <= 1000
    assert max(record["steps"]["slowest"][63]) == round(step_us(63, 700))
    assert max(record["steps"]["time"][63]) < 50_000  # the median of several steps
    assert len(html_of(record).encode()) < 5 * MEGABYTE


def test_the_excerpts_are_the_events_of_their_steps(events, page):
    typical, slowest = embedded(page)["excerpts"]
    assert slowest["title"] == "around the slowest step: 699 to 701"
    first, last = typical_steps(steps_of(events))
    assert typical["title"] == f"typical steps: {first} to {last}"
    of_rank_3 = [i for i, row in enumerate(typical["row"]) if typical["rows"][row][0] == 3]
    texts, kinds = typical["texts"], typical["kind"]
    steps = {
        texts[typical["name"][i]]: typical["duration"][i] for i in of_rank_3 if KINDS[kinds[i]] == "step"
    }
    for number in range(first, last + 1):
        assert steps[f"step {number}"] == round(step_us(3, number))
    moves = [i for i in of_rank_3 if KINDS[kinds[i]] == "move"]
    operations = [i for i in of_rank_3 if KINDS[kinds[i]] == "operation"]
    assert len(moves) == len(operations) >= 4 * 5
    assert {typical["bytes"][i] for i in operations} == {1000}
    assert {typical["row"][i] for i in moves}.isdisjoint({typical["row"][i] for i in operations})


def test_nothing_overlaps_in_a_row_and_the_longest_events_stay(events):
    excerpt = excerpt_of(events, "all", 0, 1e6, max_spans=500)
    assert len(excerpt.spans) == 500
    assert excerpt.left_out > 0
    ends = [0] * len(excerpt.rows)
    for row, begin, duration, *_ in sorted(excerpt.spans):
        assert begin >= ends[row] - 1  # both are rounded
        ends[row] = begin + duration
    kept = min(duration for _, _, duration, *_ in excerpt.spans)
    durations = sorted((e["dur"] for e in events if e["ph"] == "X" and e["ts"] < 1e6), reverse=True)
    assert kept >= round(durations[600])


def test_chosen_steps_are_those_asked_for():
    events = run(2, 20)
    (excerpt,) = data_of(events, "run", (10, 12))["excerpts"]
    assert excerpt["title"] == "the chosen steps: 10 to 12"
    with pytest.raises(InvalidArgument, match="steps 500 to 501 are not in the record, which has 2 to 21"):
        data_of(events, "run", (500, 501))


def test_without_steps_it_shows_the_beginning_and_says_so():
    record = data_of(head(0, 1) + operation(0, 1, 0, 5, 10), "few")
    assert "No steps" in record["notes"][0]
    assert record["division"][0]["communication"] == 10
    assert record["excerpts"][0]["title"] == "the beginning"
    empty = data_of(head(0, 1), "none")
    assert empty["excerpts"][0]["row"] == []


def test_no_text_of_the_record_ends_the_script():
    events = head(0, 1) + operation(0, 1, 0, 5, 10, what="</script><script>alert(1)</script>")
    page = html_of(data_of(events, "<b>run</b>"))
    assert embedded(page)["slowest"][0]["what"].startswith("</script>")
    assert page.count("<script") == 2


def test_the_command_writes_the_page(tmp_path):
    app = typer.Typer()
    app.command()(trace)
    merge([*run(2, 12), counter(0, "memory", 5.0, own=1, shared=1, device=0)], tmp_path / "run.json")
    html = tmp_path / "report.html"
    words = [str(tmp_path / "run.json"), "--html", str(html)]
    done = CliRunner().invoke(app, [*words, "--steps", "4:6"])
    assert done.exit_code == 0, done.output
    assert embedded(html.read_text())["excerpts"][0]["title"] == "the chosen steps: 4 to 6"
    assert embedded(html.read_text())["title"] == "run.json"
    for wrong, message in (("99", "not in the record"), ("6:4", "FIRST:LAST"), ("x", "FIRST:LAST")):
        failed = CliRunner().invoke(app, [*words, "--steps", wrong]).exception
        assert isinstance(failed, JobError)
        assert message in str(failed)
    nowhere = CliRunner().invoke(app, [words[0], "--html", str(tmp_path / "no" / "folder.html")]).exception
    assert isinstance(nowhere, JobError)
    assert "folder.html" in str(nowhere)
