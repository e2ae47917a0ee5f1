"""How the checks of `./scripts/gpu_check` are planned, how their jobs end, and what is reported."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from gpu_checks import jobs, main
from gpu_checks.catalog import CHECKS, MPI, NCCL, Setting, planned, settings
from gpu_checks.gpu import FAILS, HOLDS, LEFT_OUT, Finding, joined
from gpu_checks.jobs import BENCHES, launch, tail
from gpu_checks.machine import without_builder
from gpu_checks.main import NAMES, SUITE, Run, parse, without_output
from gpu_checks.report import Report, Result

HERE = {"PATH": "/usr/bin:/bin"}


def result(verdict: str, name: str = "future", seen: str = "seen [1, 2]", **figures: float) -> Result:
    finding = Finding(verdict, "expected", seen, figures)
    return Result(name, "a property", 2, NCCL, finding, 3.0, ["the last line"] if verdict == FAILS else [])


# -- what is run ----------------------------------------------------------------------------------------


def test_one_gpu_has_nccl_on_one_rank_and_host_memory_on_two():
    assert settings(1, quick=False) == [Setting(1, NCCL), Setting(2, MPI)]


def test_several_gpus_have_nccl_on_all_of_them():
    assert settings(4, quick=False) == [Setting(1, NCCL), Setting(2, NCCL), Setting(4, NCCL), Setting(2, MPI)]
    assert settings(4, quick=True) == [Setting(4, NCCL), Setting(2, MPI)]


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_every_check_is_run_or_left_out_with_a_reason(num_gpus):
    found = list(planned(list(CHECKS.values()), settings(num_gpus, quick=False)))
    assert {check.name for check, _, _ in found} == set(CHECKS)
    for check, setting, reason in found:
        assert bool(reason) == (setting.size > num_gpus and setting.transport == NCCL), (check.name, reason)
    left_out = {"contexts", "lost-rank"} if num_gpus == 1 else set()
    assert {check.name for check, _, reason in found if reason} == left_out


def test_names_of_checks_are_those_of_the_command():
    assert (SUITE, *CHECKS, *BENCHES) == NAMES
    assert parse(["--only", "future,tests"]).names == ["future", "tests"]
    with pytest.raises(SystemExit):
        parse(["--only", "futures"])


def test_what_the_limit_of_all_has_cut_off_is_left_out(tmp_path, monkeypatch):
    """It was a failure, as if the check had hung."""
    run = Run(parse(["--output", str(tmp_path / "out"), "--only", "future", "--limit", "31", "--quick"]))
    monkeypatch.setattr(run, "_facts", lambda: {"num_gpus": 1})
    ended = [0.0]

    def no_end(*given: object) -> tuple[Finding, float]:
        run._end = time.monotonic() + ended[0]
        return Finding(FAILS, "a future", "no end within 31 s"), 31.0

    monkeypatch.setattr(main, "run_check", no_end)
    run.all()
    assert run.report.results[0].finding == Finding(
        LEFT_OUT, "a future", "cut off by the 31 s of all (--limit)"
    )
    ended[0], run._end = 60.0, time.monotonic() + 31.0
    run.all()
    assert run.report.results[-2].finding.verdict == FAILS


def test_a_report_names_no_folder_of_the_user():
    words = ["--simulated", "--output", "/home/me/out", "--quick", "--output=/home/me", "--limit", "9"]
    assert without_output(words) == ["--simulated", "--quick", "--limit", "9"]


def test_a_report_does_not_name_who_built_the_mpi():
    said = "Open MPI v5.0.11, package: Open MPI me@my.host Distribution, ident: 5.0.11, Sep 16, 2026"
    assert without_builder(said) == "Open MPI v5.0.11, ident: 5.0.11, Sep 16, 2026"
    assert without_builder("MPICH Version: 4.2.3") == "MPICH Version: 4.2.3"


# -- how a job ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('fine')", ""),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import time; print('on its way', flush=True); time.sleep(60)", "no end within 1 s"),
    ],
)
def test_the_end_of_a_job_is_told(tmp_path, program, problem):
    log = tmp_path / "log.txt"
    assert launch([sys.executable, "-c", program], HERE, log, 1.0 if "sleep" in program else 30.0) == problem


CASE = '<testsuites><testsuite><testcase classname="tests.gpu.test_x" name="test_y">{}</testcase>'
OUTCOMES = {"passed": "", "failed": '<failure message="no"/>', "skipped": "<skipped/>"}


@pytest.mark.parametrize(
    ("outcomes", "problem", "verdict", "seen"),
    [
        (("passed", "passed"), "", HOLDS, "1 passed, 0 failed, 0 skipped"),
        (("passed", "failed"), "exit code 1", FAILS, "0 passed, 1 failed, 0 skipped: test_x::test_y"),
        (
            ("passed", "passed"),
            "ended by SIGABRT",
            FAILS,
            "1 passed, 0 failed, 0 skipped; then ended by SIGABRT",
        ),
        (("passed",), "exit code 1", FAILS, "exit code 1; 1 of 2 ranks left no report"),
    ],
)
def test_tests_hold_where_they_pass_on_all_ranks(tmp_path, monkeypatch, outcomes, problem, verdict, seen):
    folder = tmp_path / "tests"

    def ended(command: object, env: object, log: Path, limit_s: float) -> str:
        for rank, outcome in enumerate(outcomes):
            text = CASE.format(OUTCOMES[outcome]) + "</testsuite></testsuites>"
            (folder / f"rank-{rank}.xml").write_text(text)
        return problem

    monkeypatch.setattr(jobs, "launch", ended)
    finding, _ = jobs.run_suite(Setting(2, NCCL), folder, 10.0)
    assert (finding.verdict, finding.seen) == (verdict, seen)


@pytest.mark.parametrize("problem", ["", "exit code 1"])
def test_a_bench_without_a_record_fails(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(jobs, "launch", lambda *arguments: problem)
    for bench in BENCHES.values():
        folder = tmp_path / bench.options[0]
        finding, _, record = jobs.run_bench(bench, Setting(1, NCCL), folder, 10.0, simulated=True, quick=True)
        assert (finding.verdict, finding.seen, record) == (FAILS, problem or "no record", None)


def test_the_end_of_a_log_leaves_out_what_the_launcher_always_says(tmp_path):
    log = tmp_path / "log.txt"
    said = [
        "ValueError: x",
        "",
        "-----",
        "Primary job  terminated normally, but",
        "[host:12] [ 3] /lib/libc.so.6(abort)",
    ]
    log.write_text("\n".join([*said, "prterun noticed that process rank 0 on node host exited"]))
    assert tail(log) == ["ValueError: x"]
    assert tail(tmp_path / "none.txt") == []


# -- what is made of it ---------------------------------------------------------------------------------


def test_what_one_rank_finds_wrong_is_wrong():
    right, wrong = (
        Finding(HOLDS, "one", "two", {"s": 1.0}),
        Finding(FAILS, "one", "three", {"s": 4.0, "ms": 2.0}),
    )
    assert joined([right, right]) == right
    found = joined([right, wrong])
    assert (found.verdict, found.seen) == (FAILS, "rank 1: three")
    assert found.figures == {"s": 4.0, "ms": 2.0}


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [([HOLDS, LEFT_OUT], 0), ([HOLDS, FAILS], 1), ([LEFT_OUT], 2), ([], 2)],
)
def test_the_exit_code_tells_whether_anything_failed_or_was_checked(verdicts, code):
    assert Report({}, results=[result(verdict) for verdict in verdicts]).exit_code() == code


def test_a_report_has_every_verdict_with_what_was_expected_and_seen(tmp_path):
    report = Report(
        {"commit": "abc"}, results=[result(HOLDS), result(FAILS, "scaler"), result(LEFT_OUT, seen="no GPU")]
    )
    report.write(tmp_path)
    text, data = (tmp_path / "report.txt").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert "seen [1, 2]" in text
    assert "the last line" in text
    assert "left out: future (2 ranks by nccl): no GPU" in text
    assert text.startswith("1 hold, 1 fail, 1 left out")
    assert data["commit"] == "abc"
    assert [check["verdict"] for check in data["checks"]] == [HOLDS, FAILS, LEFT_OUT]
    assert data["checks"][0]["expected"] == "expected"


def test_a_step_counts_where_it_was_said_to():
    rows = [
        {"model": "mlp", "variant": "mpisgd", "median_s": 1.1, "ratio_to_no_communication": 1.1},
        {
            "model": "mlp",
            "variant": "DDP nccl, 25 MiB buckets",
            "median_s": 1.0,
            "ratio_to_no_communication": 1.0,
        },
    ]
    judge = BENCHES["bench-step"].judge
    assert judge(rows, True).verdict == FAILS
    assert judge(rows, False).verdict == HOLDS
    assert judge(rows, False).figures == {"mlp: ratio to none": 1.1, "mlp: ratio to DDP on NCCL": 1.1}
    assert judge([], False).verdict == FAILS
