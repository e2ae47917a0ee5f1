"""What happens inside everyone's `import torch`: names are registered, nothing is raised."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from mpisgd.job.process_changes import changes
from mpisgd.torch_backend import plugin


def rendezvous_handlers() -> dict[str, object]:
    return sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers


def test_the_backend_and_its_rendezvous_are_known():
    plugin.register()
    assert plugin.BACKEND in dist.Backend.backend_list
    assert dist.Backend.backend_capability["mpisgd"] == ["cpu", "cuda"]
    assert "mpi" in rendezvous_handlers()


@pytest.mark.parametrize("name", ["mpisgd", "MPISGD", *plugin.WITH_DEVICES])
def test_who_names_the_backend_gets_its_rendezvous_and_barrier_until_the_end(name):
    before = (rendezvous_handlers()["env"], dist.monitored_barrier)
    assert dist.Backend("gloo") == "gloo"
    assert (rendezvous_handlers()["env"], dist.monitored_barrier) == before
    try:
        assert dist.Backend(name) == dist.Backend(name) == name.lower()
        for now, then in zip((rendezvous_handlers()["env"], dist.monitored_barrier), before, strict=True):
            assert now is not then
    finally:
        changes.close()
    assert (rendezvous_handlers()["env"], dist.monitored_barrier) == before
    assert dist.Backend("mpisgd")
    assert dist.monitored_barrier is not before[1]
    changes.close()


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


@pytest.mark.parametrize("module", ["mpisgd.arguments", "mpisgd.dtypes", "mpisgd.errors"])
def test_a_module_of_ours_may_be_the_first_that_imports_torch(module):
    """torch imports the backend at the end of its own import, when such a module has only begun."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {module}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
