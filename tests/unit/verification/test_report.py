"""The matrix: what a cell says, and what the table, the summary and the picture make of it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mpisgd.verification.cell import Cell
from mpisgd.verification.jobs import append_cell, jobs_of
from mpisgd.verification.matrix import Plan
from mpisgd.verification.report import draw, summary_of, table_of

EQUAL = Cell("synchronous", "Synchronous", 2, "shared memory", "float64", "none", 1e-16, 1e-14, "drift")
WRONG = EQUAL._replace(mode="overlap", difference=0.5, step=3)
FAILED = EQUAL._replace(mode="DDP", difference=float("inf"), reason="PeerLost: rank 1")
FOUND = EQUAL._replace(sabotage="wrong scale", difference=0.5, step=0)
MISSED = EQUAL._replace(sabotage="wrong scale")


def printed(cells) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of(cells))
    return console.export_text()


@pytest.mark.parametrize(
    ("cell", "wanted"), [(EQUAL, True), (WRONG, False), (FAILED, False), (FOUND, True), (MISSED, False)]
)
def test_a_cell_is_as_wanted(cell, wanted):
    assert cell.is_as_wanted is wanted


def test_the_table_has_a_row_for_each_mode_and_a_column_for_each_kind_of_job():
    text = printed([EQUAL, WRONG, FAILED, EQUAL._replace(ranks=3, transport="messages")])
    assert "3 ranks" in text
    assert "messages" in text
    assert "WRONG 5e-01" in text
    assert "WRONG failed" in text


def test_sabotage_that_was_missed_stands_out():
    assert "MISSED" in printed([FOUND, MISSED._replace(mode="other")])


def test_the_summary_names_what_is_wrong_and_counts():
    lines = summary_of([EQUAL, WRONG, FAILED])
    assert lines[0].startswith("overlap, 2 ranks, shared memory, float64, from step 3 on: off by 5.0e-01")
    assert lines[1].endswith("PeerLost: rank 1")
    assert lines[2] == "1 of 3 cells are as they must be"
    assert "not noticed" in summary_of([MISSED])[0]


def test_the_picture_is_drawn(tmp_path):
    draw([EQUAL, WRONG, FAILED], tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


def test_cells_travel_as_lines(tmp_path):
    append_cell(tmp_path / "cells", FAILED)
    append_cell(tmp_path / "cells", WRONG)
    lines = (tmp_path / "cells").read_text().splitlines()
    assert [Cell(*json.loads(line)) for line in lines] == [FAILED, WRONG]


def test_one_job_has_no_shared_memory():
    assert [tuple(job) for job in jobs_of([1, 2, 4])] == [
        (1, "shared memory"),
        (2, "shared memory"),
        (4, "shared memory"),
        (4, "messages"),
    ]
    assert len(jobs_of([1])) == 1


def test_modes_can_be_chosen():
    assert len(Plan(quick=True).modes()) < len(Plan().modes())
    assert {mode.name for mode in Plan(only="topk").modes()} == {"TopK(ratio=0.2)", "TopK(ratio=1)"}
