"""The settings that MPI gets from mpisgd, and that never override the user's."""

from __future__ import annotations

import pytest

from mpisgd.job import mpi_settings
from mpisgd.job.mpi_settings import mpi_defaults, set_mpi_defaults


@pytest.mark.parametrize(("local_size", "yields"), [(1, False), (4, False), (5, True), (None, False)])
def test_ranks_yield_when_there_are_more_than_cores(local_size, yields):
    env = {} if local_size is None else {"OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)}
    defaults = mpi_defaults(env, cores=4)
    assert (defaults.get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    assert defaults["OMPI_MCA_osc"] == "^ucx"


def test_settings_of_the_user_stand():
    env = {
        "OMPI_MCA_osc": "ucx",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "100000",
        "OMPI_COMM_WORLD_SIZE": "100000",
    }
    before = dict(env)
    assert mpi_defaults(env, cores=1) == {}
    assert set_mpi_defaults(env) == {}
    assert env == before


@pytest.mark.parametrize(
    ("offered", "chosen"), [("munge,native", "native"), ("munge", None), ("native", None), (None, None)]
)
def test_security_of_pmix_that_the_wheel_lacks_is_left_out_where_there_is_another(offered, chosen):
    env = {} if offered is None else {"PMIX_SECURITY_MODE": offered}
    assert mpi_defaults(env).get("PMIX_SECURITY_MODE") == chosen


@pytest.mark.parametrize(
    ("env", "listens"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, True),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "OMPI_MCA_mpi_ft_enable": "1",
            },
            True,
        ),
    ],
    ids=["alone", "one host", "two hosts", "slurm", "fault tolerance"],
)
def test_open_mpi_listens_where_it_may_need_to(env, listens):
    left_out = mpi_defaults(env, cores=8).get("OMPI_MCA_btl", "")
    assert ("tcp" not in left_out) == listens


@pytest.mark.parametrize("fabric", [True, False])
@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_open_mpi_looks_for_fabrics_where_there_may_be_one(fabric, local_size):
    """It takes a second to find none; on one host it needs none."""
    env = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)}
    left_out = mpi_defaults(env, cores=8, fabric=fabric).get("OMPI_MCA_btl", "")
    assert ("ofi" not in left_out) == (fabric and local_size < 4)


def test_a_fabric_is_known_by_its_devices(tmp_path):
    assert not mpi_settings._has_fabric(tmp_path)
    (tmp_path / "infiniband").mkdir()  # its driver is there, no card is
    assert not mpi_settings._has_fabric(tmp_path)
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    assert mpi_settings._has_fabric(tmp_path)


def test_set_mpi_defaults_tells_what_it_set():
    env = {"OMPI_COMM_WORLD_LOCAL_SIZE": "100000", "OMPI_COMM_WORLD_SIZE": "100000"}
    assert set_mpi_defaults(env) == {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl": "^tcp,ofi",
    }
    assert set_mpi_defaults(env) == {}


def test_where_losses_are_survived_mpis_end_does_not_wait_for_the_lost():
    name = "OMPI_MCA_async_mpi_finalize"
    assert mpi_defaults({"OMPI_MCA_mpi_ft_enable": "1"}, cores=4, local_size=4)[name] == "1"
    assert name not in mpi_defaults({}, cores=4, local_size=4)
