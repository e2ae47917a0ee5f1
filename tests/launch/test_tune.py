"""`python -m mpisgd tune`: a profile that jobs use. Nothing here looks at speed."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch  # noqa: F401  it imports the backend "mpisgd", which wants the modules below whole
from launcher import run_python

from mpisgd.collectives.dispatch import TUNED
from mpisgd.tuning.profile import read

SHORT = ("--budget", "1", "--passes", "1", "--max-size", "1KiB")


def run(tmp_path, *args, num_ranks=2, **env):
    """Run with a cache folder of the test's own."""
    settings = {"XDG_CACHE_HOME": str(tmp_path), "MPISGD_PROFILE": "", **env}
    return run_python(*args, num_ranks=num_ranks, env=settings)


def tune(tmp_path, *args, num_ranks=2, **env):
    return run(tmp_path, "-m", "mpisgd", "tune", *args, num_ranks=num_ranks, **env)


def program(tmp_path, text, **env):
    file = tmp_path / "prog.py"
    file.write_text(textwrap.dedent(text))
    return run(tmp_path, "-W", "error", str(file), **env)


def test_a_profile_is_measured_and_found_by_the_next_job(tmp_path):
    done = tune(tmp_path, *SHORT)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "mpisgd" / "profile-2.json"
    assert done.stdout.splitlines()[0].strip() == "2 ranks on one host"
    assert done.stdout.count(f"written to {path}") == 1
    for purpose in ("all_reduce", "all_reduce of half precision", "broadcast", "all_gather", "all_to_all"):
        assert done.stdout.count(f"2 ranks on one host, {purpose}: ") == 1

    page = json.loads(path.read_text())
    assert page["command"] == "python -m mpisgd tune --budget 1 --passes 1 --max-size 1KiB"
    assert page["machine"]["cores"] >= 1
    assert page["versions"].keys() >= {"mpisgd", "Python", "torch", "mpi4py", "MPI"}
    (measured,) = read(path).measured
    assert measured.ranks_per_host == (2,)
    ways = {(curve.algorithm, curve.half) for curve in measured.curves if curve.collective == "all_reduce"}
    always = {(name, half) for name in ("node", "mpi", "all_to_all") for half in (False, True)}
    assert ways - always in (set(), {("direct", False), ("direct", True)})  # where the ranks can
    assert ways >= always
    others = {(c.collective, c.algorithm, c.half) for c in measured.curves} - {
        ("all_reduce", *w) for w in ways
    }
    assert others == {(kind, name, False) for kind in TUNED for name in ("node", "mpi")}
    for curve in measured.curves:
        assert [nbytes for nbytes, _ in curve.points] == [256 * 2**power for power in range(3)]
        for nbytes, seconds in curve.points:
            assert 0 < curve.seconds(nbytes) < 100 * seconds

    info = run(tmp_path, "-m", "mpisgd", "info")
    assert (info.returncode, info.stderr) == (0, "")
    assert f"chooses by the profile {path}" in info.stdout


@pytest.mark.long
def test_a_dry_run_writes_nothing(tmp_path):
    done = tune(tmp_path, *SHORT, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on one host, all_reduce: " in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_three_ranks_without_shared_memory_write_where_they_are_told(tmp_path):
    out = tmp_path / "mine.json"
    done = tune(tmp_path, *SHORT, "--out", str(out), num_ranks=3, MPISGD_SHARED_MEMORY="0")
    assert done.returncode == 0, done.stderr
    assert f"MPISGD_PROFILE={out}" in done.stdout
    (measured,) = read(out).measured
    assert measured.ranks_per_host == (3,)
    assert "node" not in {curve.algorithm for curve in measured.curves}
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("args", "num_ranks", "said"),
    [
        ((), None, "mpirun -np 2 python -m mpisgd tune"),
        (("--max-size", "much"), 2, "'much' is no size"),
        ((*SHORT, "--out", "/proc/profile.json"), 2, "cannot write the profile /proc/profile.json"),
    ],
)
def test_mistakes_are_said_once_and_in_one_line(tmp_path, args, num_ranks, said):
    done = tune(tmp_path, *args, num_ranks=num_ranks)
    assert done.returncode == 2
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_damaged_profile_is_one_warning_of_the_job(tmp_path):
    """Where warnings are errors, too: then the job ends with it, and nobody waits."""
    path = tmp_path / "mpisgd" / "profile-2.json"
    path.parent.mkdir()
    path.write_text('{"format": "mpisgd profile", "vers')
    text = "import mpisgd, warnings\n{}\nmpisgd.init(); mpisgd.barrier()\nprint('end')"
    done = program(tmp_path, text.format("warnings.simplefilter('always')"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"the profile {path} cannot be used") == 1
    assert done.stdout.count("end") == 2
    done = program(tmp_path, text.format(""))
    assert done.returncode != 0
    assert f"RuntimeWarning: the profile {path} cannot be used" in done.stderr


def test_a_named_profile_that_is_not_there_ends_the_job(tmp_path):
    done = program(tmp_path, "import mpisgd; mpisgd.init()", MPISGD_PROFILE="/nowhere/mine.json")
    assert done.returncode != 0
    assert "InvalidArgument: MPISGD_PROFILE='/nowhere/mine.json'" in done.stderr
