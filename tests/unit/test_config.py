"""What the environment says, by launcher, and the defaults that never override the user."""

from __future__ import annotations

import os

import pytest

from mpisgd import config
from mpisgd.cores import available_cores
from mpisgd.errors import InvalidArgument

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3", "SLURM_STEP_NUM_TASKS": "6"}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [(OPEN_MPI, (3, 8, 4)), (MPICH, (1, 2, 2)), (SLURM, (5, 6, 3)), ({}, (None, None, None))],
    ids=["Open MPI", "MPICH", "Slurm", "none"],
)
def test_each_launcher_is_understood(env, wanted):
    got = config.launcher_rank(env), config.launcher_size(env), config.launcher_local_size(env)
    assert got == wanted


# What each launcher tells a rank, and what torchrun would.
OPEN_MPI_RANK = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA_RANK = {**MPICH, "MPI_LOCALRANKID": "0"}
SLURM_BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3"}
SLURM_STEP = {**SLURM, "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        (OPEN_MPI_RANK, ("3", "8", "1", "4")),
        (HYDRA_RANK, ("1", "2", "0", "2")),  # MPICH and Intel MPI
        (SLURM_STEP, ("5", "6", "2", "3")),
        ({**SLURM_BATCH, **HYDRA_RANK}, ("1", "2", "0", "2")),
        ({**SLURM_STEP, **OPEN_MPI_RANK}, ("3", "8", "1", "4")),
    ],
    ids=["Open MPI", "Hydra", "Slurm step", "Hydra in a batch script", "Open MPI in a step"],
)
def test_each_launcher_is_understood_as_torchrun(env, wanted):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert config.torchrun_variables(env) == dict(zip(names, wanted, strict=True))


def test_an_interactive_shell_in_an_allocation_of_many_is_a_world_of_one():
    """salloc's shell is a step of one task, in an environment that knows the allocation's number."""
    env = {**SLURM_BATCH, "SLURM_STEP_NUM_TASKS": "1"}
    assert config.torchrun_variables(env)["WORLD_SIZE"] == "1"


@pytest.mark.parametrize("env", [{}, SLURM_BATCH, {"RANK": "3"}], ids=["none", "batch script", "torchrun"])
def test_where_no_launcher_started_ranks_there_is_nothing_to_publish(env):
    assert config.torchrun_variables(env) == {}


def test_what_torchrun_has_set_is_read():
    assert config.torchrun_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)
    assert config.torchrun_rank({"RANK": "", "WORLD_SIZE": "x"}) == (None, None)


@pytest.mark.parametrize(
    ("tasks", "node", "wanted"),
    [
        ("2(x2),1", "0", 2),
        ("2(x2),1", "1", 2),
        ("2(x2),1", "2", 1),
        ("4", "0", 4),
        ("2", "7", 3),
        ("x", "0", 3),
    ],
)
def test_nodes_of_a_slurm_step_may_have_different_numbers_of_ranks(tasks, node, wanted):
    env = {**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert config.launcher_local_size(env) == wanted


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
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("env", "wanted"),
    [({}, None), ({"MPISGD_PROFILE": ""}, None), ({"MPISGD_PROFILE": "mine.json"}, "mine.json")],
)
def test_a_profile_is_named_or_looked_for(env, wanted):
    assert config.profile(env) == wanted


@pytest.mark.parametrize(
    ("env", "wanted"), [({}, "auto"), ({"MPISGD_GPU": ""}, "auto"), ({"MPISGD_GPU": "mpi"}, "mpi")]
)
def test_the_way_of_gpu_tensors_is_chosen(env, wanted):
    assert config.gpu(env) == wanted


def test_a_way_that_there_is_not_is_an_error():
    with pytest.raises(InvalidArgument, match="MPISGD_GPU='gloo': expected one of auto, nccl, mpi"):
        config.gpu({"MPISGD_GPU": "gloo"})


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("MPISGD_SHARED_MEMORY", config.shared_memory),
        ("MPISGD_CROSS_MEMORY", config.cross_memory),
        ("MPISGD_KEEP_MEMORY", config.keep_memory),
    ],
)
def test_memory_is_used_unless_it_is_switched_off(name, asked):
    assert asked({})
    assert asked({name: "1"})
    assert not asked({name: "0"})
    with pytest.raises(InvalidArgument, match=f"{name}='no': expected 0 or 1"):
        asked({name: "no"})
    with pytest.raises(InvalidArgument, match=f"{name}='no': expected 0 or 1"):
        config.check({name: "no"})


TORCH_ASKS, GLIBC_ASKS = {"THP_MEM_ALLOC_ENABLE": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize(
    ("setting", "env", "wanted"),
    [
        ("[always] madvise never", {}, True),
        ("always [madvise] never", {}, False),
        ("always [madvise] never", {"THP_MEM_ALLOC_ENABLE": "0"}, False),
        ("always [madvise] never", TORCH_ASKS, True),
        ("always [madvise] never", GLIBC_ASKS, True),
        ("always madvise [never]", TORCH_ASKS | GLIBC_ASKS, False),
    ],
)
def test_huge_pages_are_the_kernels_choice_or_are_asked_for(tmp_path, setting, env, wanted):
    told = tmp_path / "enabled"
    assert not config.huge_pages(env, told)
    told.write_text(setting + "\n")
    assert config.huge_pages(env, told) == wanted


def test_what_was_measured_is_kept_in_the_users_cache(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(config.cache_folder({"XDG_CACHE_HOME": "/caches"})) == "/caches/mpisgd"
    assert str(config.cache_folder({})) == "/home/someone/.cache/mpisgd"


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        (SLURM_BATCH, False),
        ({**SLURM_BATCH, "SLURM_STEP_NUM_TASKS": "1"}, False),
        (SLURM_STEP, True),
        ({**SLURM_BATCH, **OPEN_MPI_RANK}, True),
        (HYDRA_RANK, True),
    ],
    ids=["none", "batch script", "interactive shell", "srun", "mpirun in a batch script", "MPICH"],
)
def test_a_batch_script_is_not_one_of_several_ranks(env, wanted):
    assert config.is_launched(env) == wanted
    assert config.starts_alone(env) != wanted


def test_a_batch_script_has_no_rank():
    assert config.launcher_rank(SLURM_BATCH) is None
    assert config.launcher_size(SLURM_BATCH) is None
    assert config.launcher_local_size(SLURM_BATCH) is None


def test_a_note_goes_into_a_plain_file_of_this_user_and_into_nothing_else(tmp_path):
    """The launcher's file was opened by its name, whatever lay there."""
    notes, victim = tmp_path / "notes", tmp_path / "victim"
    victim.write_text("precious")
    notes.write_text("first\n")
    config.note("second", {config.NOTES_VARIABLE: str(notes)})
    assert notes.read_text() == "first\nsecond\n"
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "absent"):
        config.note("x", {config.NOTES_VARIABLE: str(tmp_path / name)})
    assert victim.read_text() == "precious"
    assert not (tmp_path / "absent").exists()
    if os.getuid() == 0:
        os.chown(notes, 65534, 65534)
        config.note("third", {config.NOTES_VARIABLE: str(notes)})
        assert notes.read_text() == "first\nsecond\n"
