"""A picture that is drawn again from its table has the numbers of the table."""

from __future__ import annotations

import pytest
import redraw
from measurements import FOLDER, parse


@pytest.mark.parametrize(
    ("cell", "value"), [("1.2 ms", 1.2e-3), ("64 KiB", 65536), ("97.86%", 97.86), ("1,234", 1234)]
)
def test_a_cell_is_a_number(cell, value):
    assert redraw.number(cell) == pytest.approx(value)


@pytest.mark.parametrize("name", [name for name in redraw.NAMES if not name.startswith("strategies")])
def test_a_record_has_each_row_of_its_table(name):
    found = parse((FOLDER / f"{name}.md").read_text())
    rows = redraw.record(name, found)["rows"]
    cells = [row for table in found.tables for row in redraw.cells(table)]
    assert [row["variant"] for row in rows] == [row["variant"] for row in cells]
    medians = [redraw.number(row.get("median") or row["peak"]) for row in cells]
    assert [row.get("median_s") or row["median_bytes"] for row in rows] == pytest.approx(medians, rel=0.02)
