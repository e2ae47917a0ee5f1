"""What a job changes of its process: the ranks that it publishes, the collector; and that it is undone."""

from __future__ import annotations

import gc

import pytest

from mpisgd.job import lifecycle, process_changes

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
AS_TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def published(env: dict[str, str]) -> dict[str, str]:
    """What is added to an environment."""
    after = dict(env)
    process_changes.publish_rank(after)
    process_changes.changes.pop_all()
    return {name: value for name, value in after.items() if name not in env}


def test_the_launchers_ranks_are_published_as_torchrun_does_it():
    assert published(OPEN_MPI) == AS_TORCHRUN


def test_what_agrees_is_completed():
    assert published({**OPEN_MPI, "RANK": "3"}) == {k: v for k, v in AS_TORCHRUN.items() if k != "RANK"}


@pytest.mark.parametrize("name", AS_TORCHRUN)
def test_ranks_of_another_launcher_stay_and_are_not_mixed_with_ours(name):
    """torchrun started by mpirun, once per host: its children are ranks of another job."""
    assert published({**OPEN_MPI, name: "7"}) == {}


def test_without_a_launcher_nothing_is_published():
    assert published({"HOME": "/root"}) == {}


def test_what_was_published_is_taken_back_unless_somebody_has_set_another():
    env = dict(OPEN_MPI)
    process_changes.publish_rank(env)
    env["LOCAL_RANK"] = "7"
    process_changes.changes.close()
    assert env == {**OPEN_MPI, "LOCAL_RANK": "7"}


@pytest.mark.parametrize(("launched", "frozen_before", "times"), [(True, 0, 1), (True, 9, 0), (False, 0, 0)])
def test_ranks_do_not_search_torchs_modules_for_garbage(monkeypatch, launched, frozen_before, times):
    """Once, and only under a launcher."""
    calls = []
    monkeypatch.setattr(process_changes.config, "is_launched", lambda: launched)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen_before)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    process_changes.freeze_modules()
    process_changes.changes.pop_all()
    assert len(calls) == times


def test_where_no_job_begins_the_process_is_as_before(monkeypatch):
    undone = []
    process_changes.changes.callback(undone.append, 1)
    monkeypatch.setattr(lifecycle, "_start", lambda *_: 1 / 0)
    monkeypatch.setattr(lifecycle, "job_place", lambda: lifecycle.PROCESS)
    monkeypatch.setattr(lifecycle.PROCESS, "job", None)
    with pytest.raises(ZeroDivisionError):
        lifecycle.init()
    assert undone == [1]
