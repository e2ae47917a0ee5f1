"""The report of `validate_plan.py`: what it says of cases, and which portions it still measures."""

from __future__ import annotations

from pathlib import Path

import validate_plan


def row(method, predicted_s, sent=(1e6, 1e6), *, counts_bytes=True):
    measured_sent, predicted_sent = sent
    return {
        "where": "2 x 1, 1gbit",
        "model": "wide",
        "method": method,
        "alone_s": 0.5,
        "measured_s": 1.0,
        "predicted_s": predicted_s,
        "measured_sent": measured_sent,
        "predicted_sent": predicted_sent,
        "counts_bytes": counts_bytes,
        "load": 1.0,
    }


def test_the_median_of_two_is_between_them():
    found = validate_plan.errors([row("Synchronous", 1.02), row("Synchronous", 1.1)])
    assert [cells[:3] for cells in found if cells[0] == "Synchronous"] == [["Synchronous", "6.0%", "10.0%"]]


def test_bytes_of_layouts_that_were_not_counted_are_left_out_and_said():
    """72 bytes of a layout were counted in the world's group, and 2 MiB predicted in its own ones."""
    rows = [
        row("Synchronous", 1.0, (1e6 + 100, 1e6)),
        row("Parallel(pp=2)", 1.0, (72, 2097152), counts_bytes=False),
    ]
    text = "\n".join(validate_plan.notes(rows))
    assert "bytes were not counted in 1 cases of layouts" in text
    assert "100 to 100 more than predicted" in text
    assert "in 1 cases" in text


class Done:
    returncode = 0


def test_portions_are_measured_in_turn_and_only_those_that_are_missing(monkeypatch, tmp_path):
    """A part is there when it has all its models: what was cut off is measured again."""
    asked = []

    def run(words):
        asked.append(Path(words[words.index("run") + 3]))
        asked[-1].write_text("{}")
        return Done()

    monkeypatch.setattr(validate_plan, "PARTS", tmp_path)
    monkeypatch.setattr(validate_plan.subprocess, "run", run)
    monkeypatch.setattr(validate_plan, "report", lambda: None)
    portions = validate_plan.ALL_PORTIONS
    for portion in portions[2:]:
        validate_plan.part_of(*portion).write_text("{}")
    validate_plan.part_of(*portions[0]).with_suffix(".draft").write_text(
        "{}"
    )  # of a portion that was cut off
    validate_plan.all_portions("", minutes=0, load=1e9)
    assert asked == []
    validate_plan.all_portions("", minutes=60, load=-1)
    assert asked == []
    validate_plan.all_portions("", minutes=60, load=1e9)
    assert asked == [validate_plan.part_of(*portion).with_suffix(".draft") for portion in portions[:2]]
    assert not list(tmp_path.glob("*.draft"))
    assert all(validate_plan.part_of(*portion).exists() for portion in portions)
