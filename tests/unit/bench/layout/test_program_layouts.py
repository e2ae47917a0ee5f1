"""Which layouts are tried, what a log says of a program's steps, and which layout is called the fastest."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from mpisgd.errors import JobError
from mpisgd.tools.bench.layout.comparison import Comparison, layout_rows, start_command, verdict
from mpisgd.tools.bench.layout.plan import LayoutPlan, ProcessLayout, layouts_of
from mpisgd.tools.bench.layout.program import Steps, TooFewSteps, complaint, read_steps, without_boxes

ONE, HALF, TWO = ProcessLayout(1, 2), ProcessLayout(1, 1), ProcessLayout(2, 1)
PLAN = LayoutPlan(
    [sys.executable, "train.py"],
    [ONE, HALF, TWO],
    ["/x/mpirun"],
    True,
    "rank",
    warmup=2,
    steps=3,
    rounds=3,
    limit_s=9,
)


# -- what is tried ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 6, 8, 48])
def test_layouts_fit_the_cores_and_use_all_of_them_for_each_number_of_ranks(cores):
    found = layouts_of(cores)
    assert len(set(found)) == len(found)
    assert found[0] == (1, cores)
    assert {(1, 1), (cores, 1)} <= set(found)
    assert all(ranks * threads <= cores for ranks, threads in found)
    assert {ranks for ranks, threads in found if ranks * threads == cores} == {
        number for number in range(1, cores + 1) if cores % number == 0
    }


def test_layouts_as_they_are_asked_for():
    assert layouts_of(8, [2, 16]) == [(2, 4), (2, 2), (16, 1)]
    assert layouts_of(8, [1, 4], threads=[1, 3]) == [(1, 3), (1, 1), (4, 1)]
    assert [layout.ranks for layout in layouts_of(6, joined_batch=64)] == [1, 1, 1, 2, 2]


def test_a_joined_batch_is_divided_and_one_rank_needs_no_launcher():
    plan = replace(PLAN, program=["train.py", "--batch={batch}"], batch="64")
    assert plan.command(ONE) == ["train.py", "--batch=64"]
    assert plan.command(TWO) == ["/x/mpirun", "-n", "2", "train.py", "--batch=32"]
    assert (plan.batches_per_step(TWO), PLAN.batches_per_step(TWO)) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": "half"}, "--batch half: expected rank, total, or a number"),
        ({"batch": "64"}, "go together"),
        ({"program": ["train.py", "{batch}"]}, "go together"),
        ({"layouts": []}, "no number of ranks and threads fits"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, said):
    with pytest.raises(JobError, match=said):
        replace(PLAN, **changes)


# -- a log -----------------------------------------------------------------------------------------------


def test_the_optimizer_that_steps_most_is_what_counts_and_half_a_line_is_none():
    log = "ranks 2\nstep 0 1.0 1\nstep 1 1.5 1\nstep 1 2.0 4\nstep 1 2.5"
    assert read_steps(log) == (2, [1.5, 2.0], 4)
    assert read_steps("") == (0, [], 0)


def test_waiting_for_data_counts_and_pauses_and_the_warmup_do_not():
    times = [0.0, 50.0, 51.0, 52.0, 55.0, 56.0, 96.0, 97.0]  # a wait of 3 s, a pause of 40
    assert Steps(1, times, 1).seconds_per_step(warmup=2) == pytest.approx(7 / 5)


@pytest.mark.parametrize(
    ("steps", "code", "said"),
    [
        (Steps(0, [], 0), 3, "the program ended with exit code 3 and has not called mpisgd.init()"),
        (
            Steps(2, [], 0),
            None,
            "was ended after 9 s (--time-limit) before any torch optimizer has taken a step",
        ),
        (Steps(2, [0.5], 1), 0, "after 1 step, too early: --warmup and --steps ask for 5"),
    ],
)
def test_a_program_that_takes_too_few_steps_is_told_why(steps, code, said):
    assert said in complaint(steps, PLAN, code)


def test_the_launchers_boxes_are_not_the_programs_output():
    rule = "-" * 74
    assert without_boxes(["mine", rule, "MPI_ABORT was invoked", rule]) == ["mine"]
    assert without_boxes([rule, "no such host", rule]) == [rule, "no such host", rule]


# -- the comparison --------------------------------------------------------------------------------------


def test_ranks_are_compared_by_batch_not_by_step():
    rows = layout_rows(PLAN, {ONE: [3.0, 3.5, 3.0], TWO: [4.0, 4.2, 4.4]})
    assert [row["variant"] for row in rows] == ["2 ranks x 1 thread", "1 rank x 2 threads"]
    assert [row["ratio_to_fastest"] for row in rows] == pytest.approx([1.0, 3.0 / 2.1])
    assert (rows[0]["step_s"], rows[0]["median_s"], rows[0]["program"]) == (4.2, 2.1, "train.py")
    total = layout_rows(replace(PLAN, batch="total"), {ONE: [3.0], TWO: [4.0]})
    assert total[0]["variant"] == "1 rank x 2 threads"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            {ONE: [1.0, 1.1], HALF: [2.0, 2.0], TWO: [3.0, 3.0]},
            "several ranks, 2 ranks x 1 thread, takes 1.43 times",
        ),
        ({ONE: [4.0, 4.2], TWO: [4.0, 4.0]}, "one process, 1 rank x 2 threads, takes 2.05 times as long"),
        ({ONE: [1.0, 1.9], TWO: [3.0, 3.0]}, "their rounds overlap"),
        ({ONE: [1.0], TWO: [3.0]}, "in a single round"),
        ({ONE: [1.0]}, "fastest: 1 rank x 2 threads"),
    ],
)
def test_the_verdict_compares_ranks_with_one_process(seconds, said):
    assert said in verdict(layout_rows(PLAN, seconds))


def test_the_command_is_what_a_user_types(monkeypatch):
    monkeypatch.setattr("mpisgd.tools.bench.jobs.available_cores", lambda: 4)
    assert start_command(PLAN, ONE) == "OMP_NUM_THREADS=2 python train.py"
    assert start_command(PLAN, TWO) == "OMP_NUM_THREADS=1 mpirun --bind-to none -n 2 python train.py"
    binds_nothing = replace(PLAN, is_open_mpi=False)
    assert start_command(binds_nothing, TWO) == "OMP_NUM_THREADS=1 mpirun -n 2 python train.py"


def compare(monkeypatch, step_s, rounds=3):
    """Run a comparison of simulated programs; its record, and the layouts in the order of their starts."""
    started = []

    def run(plan, layout):
        started.append(layout)
        if step_s[layout] is None:
            raise TooFewSteps(layout, "it failed", ["Traceback"])
        return Steps(layout.ranks, [step_s[layout] * number for number in range(5)], 1)

    monkeypatch.setattr("mpisgd.tools.bench.layout.comparison.run_program", run)
    return Comparison(replace(PLAN, rounds=rounds), lambda line: None).run(), started


def test_layouts_take_turns_and_what_is_far_behind_has_no_third(monkeypatch):
    record, started = compare(monkeypatch, {ONE: 1.0, HALF: 1.6, TWO: 2.8})
    assert started == [ONE, HALF, TWO, HALF, TWO, ONE, ONE, TWO]
    assert [row["rounds"] for row in record["rows"]] == [3, 3, 2]
    assert "1 rank x 2 threads: the program itself sets torch's threads, to 1" in record["notes"]


def test_a_layout_that_fails_is_left_out_unless_it_is_the_first(monkeypatch):
    record, started = compare(monkeypatch, {ONE: 1.0, HALF: 1.0, TWO: None}, rounds=2)
    assert started == [ONE, HALF, TWO, HALF, ONE]
    assert record["left_out"] == [{"model": "train.py", "variant": str(TWO), "reason": "it failed"}]
    with pytest.raises(TooFewSteps, match="it failed"):
        compare(monkeypatch, {ONE: None})


def test_a_layout_that_fails_later_leaves_the_others(monkeypatch):
    left = {ONE: 1}

    def run(plan, layout):
        if layout in left and not left[layout]:
            raise TooFewSteps(layout, "it failed", [])
        left[layout] = left.get(layout, 9) - 1
        return Steps(layout.ranks, [float(number) for number in range(5)], layout.threads)

    monkeypatch.setattr("mpisgd.tools.bench.layout.comparison.run_program", run)
    record = Comparison(PLAN, lambda line: None).run()
    assert {row["variant"] for row in record["rows"]} == {str(HALF), str(TWO)}
    left[ONE] = 1
    with pytest.raises(TooFewSteps):
        Comparison(replace(PLAN, layouts=[ONE]), lambda line: None).run()
