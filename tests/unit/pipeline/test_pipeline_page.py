"""The tables of docs/how-to/large-models/pipelines.md are what the plans print."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.pipeline import GPipe, Interleaved, OneForwardOneBackward, PipeDream, PipeDream2BW

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "large-models" / "pipelines.md"


@pytest.mark.parametrize(
    ("plan", "versions"),
    [
        (GPipe().plan(4, 6), False),
        (OneForwardOneBackward().plan(4, 6), False),
        (Interleaved().plan(4, 4, num_ranks=2), False),
        (PipeDream().plan(4, 6), True),
        (PipeDream2BW().plan(3, 3, num_steps=3), True),
        (PipeDream().plan(2, 6, replicas=(2, 1)), False),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_the_page_shows_the_table(plan, versions):
    assert f"```text\n{plan.table(versions=versions)}\n```" in PAGE.read_text()
