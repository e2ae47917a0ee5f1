"""From seconds to rows."""

import pytest

from mpisgd.bench.cases import case_of
from mpisgd.bench.report.rows import as_bytes, as_time, collective_rows, spread, step_rows
from mpisgd.bench.scaling import scaling_rows


def test_spread_is_the_median_and_the_range():
    found = spread([3.0, 1.0, 2.0, 100.0])
    assert (found.median_s, found.min_s, found.max_s, found.rounds) == (2.5, 1.0, 100.0, 4)


def test_bandwidths_of_an_all_reduce():
    case = case_of("all_reduce", "float32", 1_000_000, 4)
    (row,) = collective_rows(case, {"mpisgd": [0.001]})
    assert row["algbw_gb_s"] == pytest.approx(1.0)
    assert row["busbw_gb_s"] == pytest.approx(1.5)
    assert row["ratio_to_limit"] is None


def test_rows_are_relative_to_the_limit_and_leave_out_what_was_not_measured():
    case = case_of("broadcast", "float32", 4096, 2)
    rows = collective_rows(case, {"mpisgd": [3.0], "gloo": [], "limit": [2.0]})
    assert [(row["variant"], row["ratio_to_limit"]) for row in rows] == [("mpisgd", 1.5), ("limit", 1.0)]


def test_steps_are_relative_to_the_faster_one_without_communication():
    seconds = {"dropped": [2.0, 2.0], "zeroed": [1.0], "elsewhere": [0.5], "mpisgd": [3.0]}
    rows = step_rows("mlp", seconds, ["dropped", "zeroed"], ["elsewhere"], batch=60)
    assert [row["ratio_to_no_communication"] for row in rows] == [2.0, 1.0, 0.5, 3.0]
    assert [row["communicates"] for row in rows] == [False, False, False, True]
    assert rows[3]["examples_per_s"] == 20


def record(size, alone, ours):
    rows = step_rows("mlp", {"dropped": alone, "zeroed": [9.0], "mpisgd": ours}, ["dropped", "zeroed"], [], 1)
    return {"size": size, "rows": rows, "models": {"mlp": {"batch_per_rank": 10}}}


def test_scaling_is_relative_to_one_rank_alone():
    rows = scaling_rows([record(1, [1.0], [1.0]), record(2, [1.25], [2.0]), record(2, [1.25], [1.0])])
    assert [(row["variant"], row["ranks"]) for row in rows] == [
        ("no communication", 1),
        ("no communication", 2),
        ("mpisgd", 1),
        ("mpisgd", 2),
    ]
    two = rows[3]
    assert (two["median_s"], two["min_s"], two["max_s"]) == (1.5, 1.0, 2.0)
    assert two["efficiency"] == pytest.approx(1 / 1.5)
    assert two["speed_up"] == pytest.approx(2 / 1.5)
    assert two["examples_per_s"] == pytest.approx(20 / 1.5)
    assert rows[1]["efficiency"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.50 s"), (0.0123, "12.3 ms"), (250e-6, "250 us"), (0.5e-6, "0.50 us"), (float("inf"), "-")],
)
def test_times_are_short(seconds, text):
    assert as_time(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(4, "4 B"), (65536, "64 KiB"), (3 * 2**19, "1.5 MiB"), (2**30, "1 GiB")]
)
def test_sizes_are_short(nbytes, text):
    assert as_bytes(nbytes) == text
