"""MPI is called again and again until the end, and not after it."""

from __future__ import annotations

import threading
import time

import pytest

from mpisgd.job.mpi_settings import mpi_defaults
from mpisgd.monitor import heartbeat


def test_it_beats_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(heartbeat, "CALL_S", 0.001)
    beats: list[str] = []
    third = threading.Event()

    def progress() -> None:
        beats.append(threading.current_thread().name)
        if len(beats) == 3:
            third.set()

    heartbeat.start(progress)
    heartbeat.start(progress)
    try:
        assert third.wait(10)
        running = sum(thread.name == "mpisgd heartbeat" for thread in threading.enumerate())
    finally:
        heartbeat.stop()
    assert running == 1, "the second start is none"
    assert set(beats) == {"mpisgd heartbeat"}
    number = len(beats)
    time.sleep(0.02)
    assert len(beats) == number
    heartbeat.stop()  # nothing


@pytest.mark.parametrize(
    ("enabled", "detector", "wanted"),
    [("ulfm", "1", True), ("1", "true", True), ("ulfm", "0", False), ("", "1", False), ("ulfm", "", False)],
)
def test_heartbeats_are_for_jobs_that_survive_losses(enabled, detector, wanted):
    env = {"OMPI_MCA_mpi_ft_enable": enabled, "OMPI_MCA_mpi_ft_detector": detector}
    assert heartbeat.is_enabled(env) is wanted


def test_the_thread_of_open_mpi_is_not_asked_for():
    """It makes ranks crash in MPI_Init: see `mpisgd.monitor.heartbeat`."""
    env = {"OMPI_MCA_mpi_ft_enable": "ulfm", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    defaults = mpi_defaults(env)
    assert heartbeat.is_enabled({**env, **defaults})
    assert "OMPI_MCA_mpi_ft_detector_thread" not in defaults


@pytest.mark.parametrize(
    ("enabled", "size", "local_size", "wanted"),
    [("ulfm", "4", "2", True), ("ulfm", "4", "4", False), ("", "4", "2", False)],
    ids=["two hosts", "one host", "no fault tolerance"],
)
def test_hosts_send_heartbeats_where_there_are_several_and_losses_are_survived(
    enabled, size, local_size, wanted
):
    env = {
        "OMPI_MCA_mpi_ft_enable": enabled,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
    }
    found = heartbeat.settings(env)
    assert bool(found) == wanted
    if wanted:
        assert found["OMPI_MCA_mpi_ft_detector_period"] == f"{heartbeat.PERIOD_S:g}"
        chosen = heartbeat.settings({**env, "OMPI_MCA_mpi_ft_detector_period": "3"})
        assert found.keys() - chosen.keys() == {"OMPI_MCA_mpi_ft_detector_period"}
