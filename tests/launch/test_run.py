"""`python -m mpisgd run`: what it starts again, what it does not, and that nothing it started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launcher import ENVIRONMENT, mpirun, python, run_python

ENV = {**os.environ, **ENVIRONMENT}

# --- with a launcher that costs nothing ---------------------------------------------------------------


@pytest.fixture
def fake(tmp_path) -> Path:
    """A launcher that leaves its command line, and ends with the codes in $CODES, one after the other."""
    path = tmp_path / "fake-mpirun"
    path.write_text(
        textwrap.dedent(
            """\
            #!/bin/bash
            [ "$1" = --version ] && { echo "mpirun (Open MPI) 5.0.0"; exit; }
            printf '%s\\n' "$* count=$MPISGD_RESTART_COUNT"
            codes=($CODES)
            code=${codes[$MPISGD_RESTART_COUNT]}
            [ "$code" = killed ] && kill -9 $$
            exit "$code"
            """
        )
    )
    path.chmod(0o755)
    return path


def run_fake(fake: Path, codes: str, *args: str) -> subprocess.CompletedProcess[str]:
    given = ("-m", "mpisgd", "run", "--launcher", str(fake), "--pause", "0.01", *args)
    return run_python(*given, env={"CODES": codes})


def test_a_failure_is_followed_by_another_start(fake):
    done = run_fake(fake, "1 killed 0 1", "-n", "1", "--restarts", "5", "true", "--restarts", "9", "-n")
    assert done.returncode == 0
    line = "-n 1 -x MPISGD_RESTART_COUNT true --restarts 9 -n count="
    assert done.stdout.splitlines() == [line + str(count) for count in range(3)]
    first, second = done.stderr.splitlines()
    assert first.startswith("mpisgd run: exit code 1 after ")
    assert first.endswith("; restart 1 of 5 in 0.01 s, no checkpoint that is known here")
    assert "exit code 137 after" in second
    assert "restart 2 of 5 in 0.02 s" in second


@pytest.mark.parametrize(("codes", "starts", "code"), [("2 0", 1, 2), ("85 0", 1, 85), ("9 8 7", 3, 7)])
def test_usage_errors_and_preemption_are_final_and_so_is_the_last_failure(fake, codes, starts, code):
    done = run_fake(fake, codes, "--restarts", "2", "true")
    assert done.returncode == code
    assert len(done.stdout.splitlines()) == starts
    assert done.stderr.splitlines()[-1].startswith(f"mpisgd run: exit code {code} after")
    assert "not started again" in done.stderr.splitlines()[-1]


def test_without_restarts_nothing_is_said(fake):
    done = run_fake(fake, "5", "true")
    assert (done.returncode, done.stderr) == (5, "")


def test_more_ranks_than_cores_are_allowed_where_nobody_else_counts_them(fake, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.touch()
    assert "--oversubscribe --bind-to none" in run_fake(fake, "0", "-n", "1000", "true").stdout
    done = run_fake(fake, "0", "--metrics-port", "9400", "true")  # ranks of other hosts know of it, too
    assert "-x MPISGD_METRICS_PORT -x MPISGD_METRICS_ADDRESS true" in done.stdout
    done = run_fake(fake, "0", "-n", "1000", "--hostfile", str(hosts), "true")
    assert done.stdout.startswith(f"-n 1000 -hostfile {hosts} -x MPISGD_RESTART_COUNT true ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "Missing argument"),
        (("nowhere.py",), "no such file: nowhere.py"),
        (("--hostfile", "nowhere", "true"), "no such host file: nowhere"),
        (("-n", "0", "true"), "--ranks"),
        (("--metrics-port", "65536", "true"), "--metrics-port"),
    ],
)
def test_users_mistakes_are_one_line(fake, args, said):
    done = run_fake(fake, "0", *args)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m mpisgd: error: ")
    assert said in line


# --- with a job ---------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
import mpisgd
from mpisgd import checkpoint

mpisgd.init(timeout_s=30)
folder, mode = Path(sys.argv[1]), sys.argv[2]
last = mpisgd.rank() == mpisgd.size() - 1
model = torch.nn.Linear(2, 1)
start = 0
if checkpoint.latest(folder):
    start = checkpoint.load(folder, model=model).step
if mpisgd.rank() == 0:
    print("from", start, "attempt", os.environ.get("MPISGD_RESTART_COUNT"), flush=True)
preemption = checkpoint.on_preemption()
with checkpoint.Writer(folder, keep_last=2) as writer:
    for step in range(start, 10_000):
        if mode == "fail" and step == 10:
            break
        if mode == "fail" and step == 3 and start == 0 and last:
            writer._thread is None or writer._thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "fail" and step == 6 and start == 2 and last:
            raise ValueError("again")
        if mode == "alone" and step == 5 and last:
            os.kill(os.getpid(), signal.SIGTERM)
        if mode in ("wait", "stubborn"):
            (folder.parent / f"pid-{mpisgd.rank()}").write_text(str(os.getpid()))
            time.sleep(0.02)
        if (step + 1) % 2 == 0 and mode == "fail":
            writer.save(step + 1, model=model)
            writer.wait()
        if preemption.agreed() and mode != "stubborn":
            writer.save(step + 1, model=model)
            writer.wait()
            preemption.exit()
"""


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "prog.py"
    path.write_text(PROGRAM)
    return path


def start_job(program: Path, mode: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mpisgd", "run", "-n", "2", *options]
    return subprocess.Popen(
        [*command, python(), str(program), str(program.parent / "saved"), mode],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(program: Path) -> list[int]:
    """Those of the ranks, once they train."""
    files = [program.parent / f"pid-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_job_goes_on_from_its_newest_checkpoint_after_failures(program):
    job = start_job(program, "fail", "--restarts", "3", "--pause", "0.1")
    said, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    assert said.splitlines() == ["from 0 attempt 0", "from 2 attempt 1", "from 6 attempt 2"]
    lines = [line for line in errors.replace("\0", "").splitlines() if "mpisgd run: " in line]
    assert len(lines) == 2
    assert "exit code 137 " in lines[0]
    assert lines[0].endswith("newest checkpoint: " + str(program.parent / "saved/step-00000002.safetensors"))
    assert "exit code 1 " in lines[1]
    assert "step-00000006" in lines[1]
    assert errors.count("Traceback") == 1, errors


def test_a_job_that_is_told_to_stop_saves_and_is_not_started_again(program):
    job = start_job(program, "wait", "--restarts", "3")
    ranks = pids(program)
    job.send_signal(signal.SIGTERM)
    said, errors = job.communicate(timeout=180)
    assert job.returncode == 85, errors
    (saved,) = (program.parent / "saved").iterdir()
    line = next(line for line in errors.replace("\0", "").splitlines() if "mpisgd run: " in line)
    assert "exit code 85 after" in line
    assert line.endswith(f" s after SIGTERM, newest checkpoint: {saved}")
    assert all(map(is_gone, ranks))
    assert said.count("from") == 1


def test_a_signal_to_one_rank_under_mpirun_stops_all_with_a_checkpoint(program):
    saved = program.parent / "saved"
    done = run_python(str(program), str(saved), "alone", num_ranks=2)
    assert done.returncode == 85, done.stderr
    assert "Traceback" not in done.stderr
    (path,) = saved.iterdir()
    assert path.name in ("step-00000006.safetensors", "step-00000007.safetensors")


@pytest.mark.parametrize("how", [pytest.param("SIGTERM twice", marks=pytest.mark.long), "SIGKILL"])
def test_nothing_is_left_behind_of_a_job_that_does_not_stop(program, how):
    job = start_job(program, "stubborn", "--restarts", "3", "--launcher", mpirun())
    ranks = pids(program)
    try:
        if how == "SIGKILL":
            job.kill()
        else:
            job.terminate()
            time.sleep(0.5)
            job.terminate()
        job.communicate(timeout=90)
        assert job.returncode != 0
        assert all(map(is_gone, ranks))
    finally:
        job.kill()
