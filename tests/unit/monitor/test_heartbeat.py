"""MPI is called again and again until the end, and not after it."""

from __future__ import annotations

import threading
import time

import pytest

from mpisgd import config
from mpisgd.monitor import heartbeat


def test_it_beats_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.001)
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
    assert config.heartbeats(env) is wanted


def test_the_thread_of_open_mpi_is_not_asked_for():
    """It makes ranks crash in MPI_Init: see `mpisgd.monitor.heartbeat`."""
    env = {"OMPI_MCA_mpi_ft_enable": "ulfm", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    defaults = config.mpi_defaults(env, cores=2)
    assert config.heartbeats({**env, **defaults})
    assert "OMPI_MCA_mpi_ft_detector_thread" not in defaults
