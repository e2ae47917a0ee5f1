"""From seconds to rows."""

import pytest

from mpisgd.tools.bench.cases import case_of
from mpisgd.tools.bench.report.rows import (
    NONE,
    NONE_NOT_KEPT,
    ONE_PROCESS,
    as_bytes,
    as_time,
    collective_rows,
    spread,
    step_rows,
)
from mpisgd.tools.bench.scaling import scaling_rows


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
    dropped, zeroed = NONE
    seconds = {dropped: [2.0, 2.0], zeroed: [1.0], "elsewhere": [0.5], "mpisgd": [3.0]}
    rows = step_rows("mlp", seconds, dict.fromkeys(seconds, 1), ["elsewhere"], batch=60)
    assert [row["ratio_to_no_communication"] for row in rows] == [2.0, 1.0, 0.5, 3.0]
    assert [row["communicates"] for row in rows] == [False, False, False, True]
    assert [row["ratio_to_one_process"] for row in rows] == [None] * 4
    assert rows[3]["examples_per_s"] == 20


def test_steps_are_relative_to_the_faster_process_and_to_what_there_is_without_mpisgd():
    seconds = {NONE_NOT_KEPT[1]: [2.0], ONE_PROCESS[0]: [4.0], ONE_PROCESS[1]: [5.0], "mpisgd": [8.0]}
    rows = step_rows("mlp", seconds, {"mpisgd": 1, ONE_PROCESS[0]: 2}, [], batch=60)
    assert [row["ratio_to_one_process"] for row in rows] == [0.5, 1.0, 1.25, 2.0]
    assert [row["ratio_to_not_kept"] for row in rows] == [1.0, 2.0, 2.5, 4.0]
    assert [row["threads"] for row in rows] == [None, 2, None, 1]
    assert [row["communicates"] for row in rows] == [False, False, False, True]


def record(size, alone, ours, one_process=(1.0, 1)):
    seconds = {NONE[0]: alone, NONE[1]: [9.0], "mpisgd": ours, ONE_PROCESS[0]: [one_process[0]]}
    threads = {**dict.fromkeys(seconds, 1), ONE_PROCESS[0]: one_process[1]}
    rows = step_rows("mlp", seconds, threads, [], 1)
    return {"size": size, "rows": rows, "models": {"mlp": {"batch_per_rank": 10}}}


def test_scaling_is_relative_to_one_rank_alone():
    rows = scaling_rows([record(1, [1.0], [1.0]), record(2, [1.25], [2.0]), record(2, [1.25], [1.0])])
    assert [(row["variant"], row["ranks"], row["batch"]) for row in rows] == [
        ("no communication", 1, 10),
        ("mpisgd", 1, 10),
        ("one process", 1, 10),
        ("no communication", 2, 20),
        ("mpisgd", 2, 20),
        ("one process", 1, 20),
    ]
    two = rows[4]
    assert (two["median_s"], two["min_s"], two["max_s"]) == (1.5, 1.0, 2.0)
    assert two["efficiency"] == pytest.approx(1 / 1.5)
    assert two["speed_up"] == pytest.approx(2 / 1.5)
    assert two["examples_per_s"] == pytest.approx(20 / 1.5)
    assert rows[3]["efficiency"] == pytest.approx(0.8)


def test_efficiency_counts_threads_and_one_process_has_the_joined_batch():
    slow, fast = record(2, [1.0], [2.0], (5.0, 1)), record(2, [1.0], [2.0], (1.6, 4))
    rows = {
        (row["variant"], row["batch"]): row for row in scaling_rows([record(1, [1.0], [1.0]), slow, fast])
    }
    joined = rows["one process", 20]
    assert (joined["threads"], joined["median_s"]) == (4, 1.6)  # the other job has chosen worse
    assert joined["speed_up"] == pytest.approx(2 / 1.6)
    assert joined["efficiency"] == pytest.approx(2 / 1.6 / 4)
    assert rows["mpisgd", 20]["ratio_to_one_process"] == pytest.approx(2.0 / 1.6)


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
