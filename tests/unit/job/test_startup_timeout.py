"""What takes too long ends the process, or whatever stands for the job, and says where it was."""

from __future__ import annotations

import threading
import time

import pytest

from mpisgd import config
from mpisgd.job import startup_timeout
from mpisgd.job.startup_timeout import within


@pytest.fixture
def several(monkeypatch):
    """Among other ranks, with a short limit, and no signal."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(startup_timeout, "LEAST_S", 0.1)
    monkeypatch.setattr(startup_timeout, "set_alarm", lambda limit_s: False)


@pytest.mark.usefixtures("several")
def test_the_shorter_of_two_limits_ends_it_with_its_exit_code_and_says_what_it_was(capfd):
    codes: list[int] = []
    ended = threading.Event()

    def end(exit_code: int) -> None:
        codes.append(exit_code)
        ended.set()

    with (
        within(30.0, "the whole", end=end, exit_code=1),
        within(0.2, "a part of it", end=end, exit_code=75),
    ):
        assert ended.wait(10.0)
    assert codes == [75]
    said = capfd.readouterr().err
    assert "has been in a part of it for 0.2 s" in said
    assert "ended.wait" in said


@pytest.mark.usefixtures("several")
def test_what_is_over_in_time_is_left_alone():
    codes: list[int] = []
    with within(0.1, "a short thing", end=codes.append):
        pass
    time.sleep(0.3)
    assert codes == []


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(("joiner", "num"), [(None, 0), ("1", 1), ("0", 1)])
def test_one_alone_has_nobody_to_wait_for_unless_it_was_started_to_join_others(monkeypatch, joiner, num):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.delenv(config.JOINER_VARIABLE, raising=False)
    if joiner is not None:
        monkeypatch.setenv(config.JOINER_VARIABLE, joiner)
    codes: list[int] = []
    with within(0.1, "a start", end=codes.append):
        time.sleep(0.5)
    assert len(codes) == num
