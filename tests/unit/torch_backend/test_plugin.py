"""What happens inside everyone's `import torch`: names are registered, ranks published, nothing is raised."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch.distributed as dist

from mpisgd.torch_backend import plugin

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
    plugin.publish_rank(after)
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


def rendezvous_handlers() -> dict[str, object]:
    return sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers


def test_the_backend_and_two_ways_to_meet_are_known():
    plugin.register()
    assert plugin.BACKEND in dist.Backend.backend_list
    assert dist.Backend("mpisgd") == "mpisgd"
    assert dist.Backend.backend_capability["mpisgd"] == ["cpu", "cuda"]
    assert {"mpi", "env"} <= rendezvous_handlers().keys()


def test_registering_again_changes_nothing():
    plugin.register()
    before = (list(dist.Backend.backend_list), dict(rendezvous_handlers()))
    plugin.register()
    assert (list(dist.Backend.backend_list), dict(rendezvous_handlers())) == before


def test_a_torch_without_distributed_is_left_alone(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist.Backend, "register_backend", None)  # calling it would be an error
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    plugin._register()


def test_an_error_is_a_warning_in_programs_that_never_asked_for_us(monkeypatch):
    def broken() -> None:
        raise ImportError("no such thing in this torch")

    monkeypatch.setattr(plugin, "_register", broken)
    with pytest.warns(RuntimeWarning, match="could not register .*no such thing"):
        plugin.register()


@pytest.mark.parametrize(("launched", "frozen_before", "times"), [(True, 0, 1), (True, 9, 0), (False, 0, 0)])
def test_ranks_do_not_search_torchs_modules_for_garbage(monkeypatch, launched, frozen_before, times):
    """Once, and only under a launcher."""
    calls = []
    monkeypatch.setattr(plugin.config, "is_launched", lambda: launched)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen_before)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    plugin.register()
    assert len(calls) == times


@pytest.mark.parametrize("module", ["mpisgd.arguments", "mpisgd.dtypes", "mpisgd.errors"])
def test_a_module_of_ours_may_be_the_first_that_imports_torch(module):
    """torch imports the backend at the end of its own import, when such a module has only begun."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {module}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
