"""The scripts of a fresh clone: what set-up does, refuses and leaves alone, and how `scripts/test` counts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import run_tests
from run_tests import outcomes, ran_under_mpi, totals, worst
from suite_stages import ALGORITHM_TESTS, Stage, plan

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ["python3", *(f"python3.{minor}" for minor in range(10, 15))]

# A python that does what set-up asks of it without the network, and writes down what it was asked.
FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "$FAKE_LOG"
case "$*" in
    *ensurepip*) exit ${FAKE_VENV:-0} ;;
    *version_info*) exit ${FAKE_RECENT:-0} ;;
    --version) echo "Python 3.12.0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip install"*+cpu*) exit ${FAKE_CPU_TORCH:-0} ;;
    *"pip install"*) echo "pip said this"; exit ${FAKE_PIP:-0} ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What set-up needs of the repository, under a path with a space, and fake pythons."""
    root = tmp_path / "a clone"
    (root / "scripts").mkdir(parents=True)
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for name in PYTHONS:
        (tmp_path / "bin" / name).write_text(FAKE_PYTHON)
        (tmp_path / "bin" / name).chmod(0o755)
    return root


def setup(
    clone: Path, extras: str = "openmpi,demo", **env: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run set-up from another directory; how it ended, and what it asked of python."""
    log = clone.parent / "log"
    log.write_text("")
    done = subprocess.run(
        ["bash", clone / "scripts" / "setup", extras],
        cwd="/",
        env={"PATH": f"{clone.parent / 'bin'}:/usr/bin:/bin", "FAKE_LOG": str(log), **env},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done, log.read_text()


# --- scripts/setup ------------------------------------------------------------------------------------


def test_setup_makes_an_environment_and_says_little(clone):
    done, asked = setup(clone)
    assert done.returncode == 0, done.stderr
    assert [line.split(" with ")[0] for line in done.stderr.splitlines()] == [
        "setup: making .venv",
        "setup: installing torch 2.13.0 (some minutes the first time)",
        "setup: installing mpisgd[openmpi,demo]",
    ]
    assert f"--constraint {clone}/constraints.txt torch==2.13.0+cpu" in asked
    assert f"--editable {clone}[openmpi,demo]" in asked


def test_setup_does_nothing_the_second_time(clone):
    setup(clone)
    for extras in ("openmpi,demo", "demo"):
        done, asked = setup(clone, extras)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert "pip" not in asked


def test_setup_adds_extras_to_those_that_are_there(clone):
    setup(clone, "openmpi,demo")
    done, asked = setup(clone, "openmpi,test")
    assert "making .venv" not in done.stderr
    assert f"--editable {clone}[openmpi,demo,test]" in asked


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_setup_installs_again_when_what_it_installs_has_changed(clone, name):
    setup(clone)
    with (clone / name).open("a") as file:
        file.write("# changed\n")
    assert "--editable" in setup(clone)[1]


def test_setup_makes_a_new_environment_where_a_clone_was_moved(clone):
    setup(clone)
    moved = clone.rename(clone.with_name("moved"))
    assert "making .venv" in setup(moved)[0].stderr


def test_setup_begins_again_after_it_was_interrupted(clone):
    assert setup(clone, FAKE_PIP="1")[0].returncode == 1
    done, _ = setup(clone)
    assert (done.returncode, done.stderr.count("installing")) == (0, 2)


def test_setup_falls_back_to_plain_torch_and_says_so_once(clone):
    done, asked = setup(clone, FAKE_CPU_TORCH="1")
    assert done.returncode == 0
    assert done.stderr.count("PIP_EXTRA_INDEX_URL") == 1
    assert "torch==2.13.0\n" in asked


def test_setup_shows_what_pip_said_where_it_failed(clone):
    done, _ = setup(clone, FAKE_PIP="1")
    assert done.returncode == 1
    assert "pip said this" in done.stderr


@pytest.mark.parametrize(
    ("missing", "said"),
    [({"FAKE_RECENT": "1"}, "python3 >= 3.10 is missing"), ({"FAKE_VENV": "1"}, "has no venv module")],
)
def test_setup_says_in_one_line_what_is_missing(clone, missing, said):
    done, _ = setup(clone, **missing)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_setup_lets_root_run_open_mpi_unless_root_has_decided(clone):
    setup(clone)
    command = f'. "{clone}/scripts/setup" demo; echo "$OMPI_ALLOW_RUN_AS_ROOT"'
    env = {"PATH": f"{clone.parent / 'bin'}:/usr/bin:/bin", "FAKE_LOG": os.devnull}
    for given, expected in (({}, "1" if os.getuid() == 0 else ""), ({"OMPI_ALLOW_RUN_AS_ROOT": "0"}, "0")):
        shell = ["bash", "-c", "set +u; " + command]
        done = subprocess.run(shell, env={**env, **given}, capture_output=True, text=True, timeout=30)
        assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize(
    "name", ["scripts/setup", "scripts/demo", "scripts/test", "scripts/check", "scripts/docs", ".ci/run"]
)
def test_script_can_be_started(name):
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True, timeout=10)


# --- scripts/test -------------------------------------------------------------------------------------

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="fails"><failure/></testcase>
<testcase classname="a" name="breaks"><error/></testcase>
<testcase classname="a" name="waits"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_from_a_report(tmp_path):
    (tmp_path / "rank-0.xml").write_text(REPORT)
    assert outcomes(tmp_path / "rank-0.xml") == {
        "a::passes": "passed",
        "a::fails": "failed",
        "a::breaks": "failed",
        "a::waits": "skipped",
    }


def test_a_test_that_fails_on_one_rank_has_failed():
    first = {"x": "passed", "y": "skipped", "z": "skipped"}
    second = {"x": "failed", "y": "passed", "z": "skipped"}
    expected = {"x": "failed", "y": "passed", "z": "skipped"}
    assert worst([first, second]) == worst([second, first]) == expected


def test_skipped_are_those_that_ran_nowhere():
    two, three = Stage("mpi 2", ("tests/mpi",), 2), Stage("mpi 3", ("tests/mpi",), 3)
    results = [
        (two, {"x": "passed", "needs three": "skipped", "never": "skipped"}),
        (three, {"x": "failed", "needs three": "passed", "never": "skipped"}),
    ]
    assert totals(results) == (2, 1, 1)


def test_a_suite_without_a_test_under_mpi_is_seen():
    unit, alone, two = Stage("unit", ()), Stage("mpi 1", (), 1), Stage("mpi 2", (), 2)
    passed, skipped = {"x": "passed"}, {"x": "skipped"}
    assert not ran_under_mpi([(unit, passed), (alone, passed), (two, skipped)])
    assert ran_under_mpi([(two, passed)])


def test_plan_covers_every_size_and_the_second_mpi():
    stages = plan()
    assert {f"mpi {size}" for size in (1, 2, 3, 4)} < {stage.name for stage in stages}
    for each in (stages, plan(long=True)):
        whole = [stage for stage in each if stage.paths == ("tests/mpi",) and stage.venv == ".venv"]
        sizes = [1, 3] if each is stages else [1, 2, 3, 4]
        assert sorted(stage.size for stage in whole if stage.size) == sizes
        assert [stage.name for stage in whole if not stage.size] == ["threads 3"]
    algorithms = [stage for stage in stages if stage.paths == (ALGORITHM_TESTS,)]
    assert [stage.options[stage.options.index("--threads") + 1] for stage in algorithms] == ["5", "8"]
    assert any(stage.venv == ".venv-mpich" for stage in stages)
    assert all((ROOT / path.partition("::")[0]).exists() for stage in stages for path in stage.paths)


def test_long_tests_are_left_out_unless_asked_for():
    assert all("not long" in " ".join(stage.options) for stage in plan())
    assert not any("not long" in " ".join(stage.options) for stage in plan(long=True))


STAGES = [
    Stage("unit", ("tests/unit",)),
    Stage("mpi 4", ("tests/mpi",), 4),
    Stage("mpi 2", ("tests/mpi",), 2),
]


def test_two_stages_run_side_by_side(monkeypatch):
    both = threading.Barrier(2)

    def run_stage(stage: Stage) -> dict[str, str]:
        if stage is not STAGES[2]:
            both.wait(10)
        return {stage.name: "passed"}

    monkeypatch.setattr(run_tests, "run_stage", run_stage)
    assert run_tests.run_stages(STAGES) == [(stage, {stage.name: "passed"}) for stage in STAGES]


def test_one_process_runs_beside_stages_of_several_and_two_after_them():
    first, second, third = (Stage(name, ()) for name in ("first", "second", "third"))
    alone, other = (Stage(name, (), is_one_process=True) for name in ("alone", "other"))
    turns = run_tests.Turns([first, second, third, alone, other])
    assert [turns.begin() for _ in range(3)] == [first, second, alone]
    turns.end(first)
    assert turns.begin() == third
    turns.end(second)
    turns.end(third)
    assert [turns.begin(), turns.begin()] == [other, None]


def test_who_interrupts_the_tests_leaves_none_running(monkeypatch, tmp_path):
    """Neither those that run nor those that would come next."""
    enough, started, before = threading.Event(), [], set(threading.enumerate())

    def interrupt() -> None:
        enough.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # another thread would not wake it

    def command(stage: Stage) -> list[str]:
        started.append(stage)
        if len(started) == run_tests.SIDE_BY_SIDE:
            enough.set()
        return ["sleep", "60"]

    monkeypatch.setattr(run_tests, "command", command)
    monkeypatch.setattr(run_tests, "OUTPUT", tmp_path)
    monkeypatch.setattr(run_tests, "interrupted", threading.Event())
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(SystemExit, match="interrupted"):
            run_tests.run_stages(STAGES)
    finally:
        signal.signal(signal.SIGINT, handler)
    for thread in set(threading.enumerate()) - before:  # the pool may not know one that it was just starting
        thread.join(30)
    assert len(started) == run_tests.SIDE_BY_SIDE
    assert not run_tests.running


def stage_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str) -> dict[str, str]:
    """Run a stage of one test file; its outcomes."""
    monkeypatch.setattr(run_tests, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    (tmp_path / "test_it.py").write_text(test)
    return run_tests.run_stage(Stage("it", ("test_it.py",), quiet_s=60))


def test_stage_that_hangs_is_ended_and_counts_as_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_tests, "command", lambda stage: ["sleep", "60"])
    monkeypatch.setattr(run_tests, "OUTPUT", tmp_path)
    found = run_tests.run_stage(Stage("it", (), quiet_s=1))
    assert list(found.values()) == ["failed"]
    assert "no progress for 1 s, 1 rank(s) left no report" in capsys.readouterr().out


def test_stage_whose_process_dies_counts_as_failed(tmp_path, monkeypatch, capsys):
    found = stage_of(tmp_path, monkeypatch, "import os\ndef test_dies(): os._exit(0)\n")
    assert list(found.values()) == ["failed"]
    assert "left no report" in capsys.readouterr().out


def test_stage_that_fails_shows_its_log(tmp_path, monkeypatch, capsys):
    found = stage_of(tmp_path, monkeypatch, "def test_sum(): assert 1 + 1 == 3\n")
    assert found == {"test_it::test_sum": "failed"}
    assert "assert (1 + 1) == 3" in capsys.readouterr().out
