"""The matrix: what a cell says, and what the table, the summary and the picture make of it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mpisgd.tools.verification.cell import Cell
from mpisgd.tools.verification.jobs import append_cell, jobs_of
from mpisgd.tools.verification.matrix import Selection
from mpisgd.tools.verification.matrix_report import kind_of
from mpisgd.tools.verification.report import draw, summary_of, table_of

EQUAL = Cell("synchronous", "Synchronous", 2, "shared memory", "float64", "none", 1e-16, 1e-14, "drift")
WRONG = EQUAL._replace(mode="overlap", difference=0.5, step=3)
FAILED = EQUAL._replace(mode="DDP", difference=float("inf"), reason="PeerLost: rank 1")
FOUND = EQUAL._replace(sabotage="wrong scale", difference=0.5, step=0)
MISSED = EQUAL._replace(sabotage="wrong scale")
BROKEN = FAILED._replace(sabotage="wrong scale")
IDLE = EQUAL._replace(ranks=1, sabotage="no communication", reason="one rank", counts=False)


def printed(cells) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of(cells))
    return console.export_text()


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        (EQUAL, True),
        (WRONG, False),
        (FAILED, False),
        (FOUND, True),
        (MISSED, False),
        (IDLE, True),
        (BROKEN, False),
    ],
)
def test_a_cell_is_as_wanted(cell, wanted):
    assert cell.is_as_wanted is wanted


def test_the_table_has_a_row_for_each_mode_and_a_column_for_each_kind_of_job():
    text = printed([EQUAL, WRONG, FAILED, EQUAL._replace(ranks=3, transport="messages")])
    assert "3 ranks" in text
    assert "messages" in text
    assert "WRONG 5e-01" in text
    assert "WRONG failed" in text


def test_a_place_has_a_number_for_each_dtype():
    float32 = EQUAL._replace(dtype="float32", difference=1e-7, tolerance=1e-6)
    half = EQUAL._replace(mode="half", dtype="bfloat16")
    text = printed([EQUAL, float32, half])
    assert "f64 f32" in text
    assert "1e-16 1e-07" in text
    assert "1e-16 bf16" in text


def test_a_sabotage_without_effect_is_shown_and_not_counted():
    assert "no effect" in printed([FOUND, IDLE])
    assert summary_of([FOUND, IDLE]) == [
        "1 of 1 cells are as they must be; 1 are not counted, where what is broken changes nothing"
    ]


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


def jobs(ranks, *, emulates: bool = True, **options) -> list[tuple[int, str]]:
    selection = Selection(**options)
    chosen = jobs_of(selection, ranks, selection.modes(), emulates_hosts=emulates)
    return [(job.ranks, job.transport) for job in chosen]


def test_jobs_reach_each_other_in_all_ways():
    shared = [(count, "shared memory") for count in (1, 2, 3, 4)]
    quick = [*shared[:3], (4, "2 hosts"), (3, "a rank is lost")]
    assert jobs([1, 2, 3, 4], quick=True) == quick
    assert jobs([4], quick=True) == [(4, "shared memory"), (4, "2 hosts"), (4, "a rank is lost")]
    assert jobs([1, 2, 3, 4]) == [
        *shared,
        (3, "2 hosts"),
        (4, "2 hosts"),
        (3, "messages"),
        (8, "shared memory"),
        (3, "a rank is lost"),
    ]
    assert jobs([1]) == [(1, "shared memory")]


def test_jobs_without_a_mode_are_left_out():
    assert jobs([1, 2], only="elastic.run") == [(2, "a rank is lost")]
    assert jobs([1, 2], only="PerHost(TopK(ratio=0.2))") == [(2, "2 hosts")]
    assert jobs([1, 2], only="PerHost(TopK(ratio=0.2))", emulates=False) == [(2, "2 hosts, pretended")]
    assert jobs([2], only="locked=False") == [(2, "shared memory")]
    assert len(jobs([2], only="elastic.run", sabotage=True)) == 4


def test_the_quick_form_loads_much_of_torch_in_one_job_and_leaves_no_mode_out():
    def loading(*ranks: int) -> list[tuple[int, str]]:
        return [
            (job.ranks, job.transport)
            for job in jobs_of(selection, ranks, modes, emulates_hosts=True)
            if job.ranks > 1 and any(mode.loads_much and job.has(mode) for mode in modes)
        ]

    selection = Selection(quick=True)
    modes = selection.modes()
    assert {"FSDP2", "DistributedDataParallel"} <= {mode.name for mode in modes if mode.loads_much}
    assert loading(3, 4) == loading(1, 4) == [(4, "2 hosts")]
    jobs = jobs_of(selection, [3, 4], modes, emulates_hosts=True)
    assert [mode.name for mode in modes if not any(job.has(mode) for job in jobs)] == []
    names = {mode.name for mode in Selection(quick=True, plain=True).modes()}
    assert names == {mode.name for mode in modes if not mode.loads_much}


def test_broken_modes_get_eight_ranks_only_where_they_need_them():
    selection = Selection(sabotage=True)
    (large,) = [job for job in jobs_of(selection, [1, 4], selection.modes()) if job.ranks > 4]
    assert (large.ranks, large.beyond) == (8, 4)
    names = {mode.name for mode in Selection(sabotage=True, beyond=large.beyond).modes()}
    assert "pipeline, FSDP2 and tensor parallel" in names
    assert "Synchronous" not in names


def test_modes_can_be_chosen():
    assert len(Selection(quick=True).modes()) < len(Selection().modes())
    assert {mode.name for mode in Selection(only="QSGD(bits=4, segment").modes()} == {
        "QSGD(bits=4, segment=10)"
    }


def test_a_picture_has_the_farthest_of_each_pair_and_what_is_equal_to_the_last_bit_as_near(
    monkeypatch, tmp_path
):
    drawn = []
    monkeypatch.setattr(
        "mpisgd.tools.verification.report.draw_decades", lambda values, rows, *_: drawn.append((values, rows))
    )
    cells = [
        EQUAL._replace(mode=mode, difference=difference, tolerance=tolerance)
        for mode, difference, tolerance in (
            ("bfloat16", 0.0, 0.0),
            ("bfloat16, wrong", 1e-9, 0.0),
            ("LocalSGD(sync_every=2), Compression.none", 0.0, 1e-14),
            ("LocalSGD(sync_every=2), compress.TopK(ratio=0.3)", 1e-13, 1e-14),
            ("LocalSGD(sync_every=2), compress.OneBit()", 1e-15, 1e-14),
        )
    ]
    draw(cells, tmp_path / "verify.png")
    ((values, rows),) = drawn
    assert rows == ["bfloat16", "bfloat16, wrong", "LocalSGD, by itself and with each compressor"]
    assert [round(row[0], 6) for row in values] == [-3, 3, 1]


def test_a_kind_is_a_method_without_its_arguments_whatever_these_have():
    assert kind_of("compress.PerHost(compressor=compress.TopK(ratio=0.5))") == "PerHost"
    assert kind_of("OneBitAdam(freeze_step=2, betas=(0.8, 0.95), eps=1e-06)") == "OneBitAdam"
    assert kind_of("Gossip(topology=gossip.Ring()), compress.TopK(ratio=0.3)") == "Gossip with a compressor"
