"""What the environment says, by launcher, and the defaults that never override the user."""

from __future__ import annotations

import pytest

from mpisgd import config
from mpisgd.errors import InvalidArgument

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3"}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [(OPEN_MPI, (3, 8, 4)), (MPICH, (1, 2, 2)), (SLURM, (5, 6, 3)), ({}, (None, None, None))],
    ids=["Open MPI", "MPICH", "Slurm", "none"],
)
def test_each_launcher_is_understood(env, wanted):
    got = config.launcher_rank(env), config.launcher_size(env), config.launcher_local_size(env)
    assert got == wanted


def test_mpirun_inside_a_slurm_job_goes_first():
    assert config.launcher_rank({**SLURM, **OPEN_MPI}) == 3


@pytest.mark.parametrize("text", ["", "x", "-1", "3.5", "4(x2)"])
def test_what_is_no_number_is_ignored(text):
    assert config.launcher_rank({"OMPI_COMM_WORLD_RANK": text}) is None
    assert config.launcher_local_size({"SLURM_NTASKS_PER_NODE": text}) is None


def test_the_time_limit_comes_from_the_environment():
    assert config.timeout_s({}) == config.DEFAULT_TIMEOUT_S
    assert config.timeout_s({"MPISGD_TIMEOUT_S": "2.5"}) == 2.5


@pytest.mark.parametrize("text", ["0", "-3", "soon", "", "nan"])
def test_a_time_limit_that_makes_no_sense_is_refused(text):
    with pytest.raises(InvalidArgument, match="MPISGD_TIMEOUT_S"):
        config.timeout_s({"MPISGD_TIMEOUT_S": text})


@pytest.mark.parametrize(("local_size", "yields"), [(1, False), (4, False), (5, True), (None, False)])
def test_ranks_yield_when_there_are_more_than_cores(local_size, yields):
    env = {} if local_size is None else {"OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)}
    defaults = config.mpi_defaults(env, cores=4)
    assert (defaults.get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    assert defaults["OMPI_MCA_osc"] == "^ucx"


def test_settings_of_the_user_stand():
    env = {"OMPI_MCA_osc": "ucx", "OMPI_MCA_mpi_yield_when_idle": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "100000"}
    before = dict(env)
    assert config.mpi_defaults(env, cores=1) == {}
    assert config.set_mpi_defaults(env) == {}
    assert env == before


def test_set_mpi_defaults_tells_what_it_set():
    env = {"OMPI_COMM_WORLD_LOCAL_SIZE": "100000"}
    assert config.set_mpi_defaults(env) == {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert config.set_mpi_defaults(env) == {}


@pytest.mark.parametrize(
    ("current", "local_size", "cores", "wanted"),
    [(8, 1, 8, 8), (8, 2, 8, 4), (8, 3, 8, 2), (8, 16, 8, 1), (1, 2, 8, 1), (2, 2, 64, 2)],
)
def test_threads_share_the_cores(current, local_size, cores, wanted):
    assert config.default_threads(current, local_size, cores, {}) == wanted


@pytest.mark.parametrize("name", config.THREAD_VARIABLES)
def test_threads_that_the_user_chose_stand(name):
    assert config.default_threads(7, 4, 8, {name: "7"}) == 7


def test_there_is_at_least_one_core():
    assert config.available_cores() >= 1
