"""What ./scripts/release_check --record writes into benchmarks/releases.md."""

from __future__ import annotations

from measurements import parse
from release_record import recorded

TODAY = "2026-11-30"
ROW = ("3.12:", "3.12.1", "2.14.1", "Open MPI 5 (wheel)", "451 passed")
BEFORE = """# Releases

- command: `./scripts/release_check`
- machine: one
- versions: mpisgd 0.1.0
- date: 2026-11-28
- missing: `3.14:`, no Python 3.14 on this machine
- note: one run hung

## MPI tests

| case | Python | torch | MPI | MPI tests in short form, at 2 and at 3 ranks | date |
| --- | --- | --- | --- | --- | --- |
| 3.12: | 3.12.1 | 2.14.0 | Open MPI 5 (wheel) | 450 passed | 2026-11-28 |
| 3.9: | 3.9.1 | 2.14.0 | Open MPI 5 (wheel) | 450 passed | 2026-11-28 |
"""


def rows(found):
    return [row[0] for row in found.table("MPI tests").rows]


def test_a_case_takes_the_place_of_its_earlier_row_and_others_stay():
    found = parse(recorded(parse(BEFORE), [ROW], "0.1.0", TODAY).text)
    assert rows(found) == ["3.9:", "3.12:"]
    assert found.table("MPI tests").rows[1] == [*ROW, TODAY]
    assert found.all_of("missing") == ["`3.14:`, no Python 3.14 on this machine"]
    assert found.all_of("note") == ["one run hung"]


def test_two_libraries_of_a_case_have_a_row_each():
    lines = [
        ("system-mpi", "3.11.2", "2.13.0", mpi, "451 passed") for mpi in ("Open MPI 4.1.4", "MPICH 4.0.2")
    ]
    found = recorded(parse(BEFORE), lines, "0.1.0", TODAY)
    assert rows(found).count("system-mpi") == 2


def test_a_case_that_fails_now_loses_its_row_and_is_named():
    lines = [ROW, ("missing", "3.12:", "fails")]  # its last step failed
    found = recorded(parse(BEFORE), lines, "0.1.0", TODAY)
    assert rows(found) == ["3.9:"]
    assert "`3.12:`, fails" in found.all_of("missing")
    again = recorded(found, [ROW], "0.1.0", TODAY)
    assert "`3.12:`, fails" not in again.all_of("missing")


def test_an_earlier_version_keeps_its_rows_in_a_table_of_its_own():
    found = recorded(parse(BEFORE), [ROW], "0.2.0", TODAY)
    assert rows(found) == ["3.12:"]
    assert [table.title for table in found.tables] == [
        "MPI tests",
        "earlier, with mpisgd 0.1.0, on 2026-11-28",
    ]
    assert found.all_of("missing") == []
