"""What `scripts/test` runs on threads is there, and its stages run each test somewhere."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import suite_stages

FOLDER = Path(__file__).parents[1] / "mpi"


def files() -> tuple[str, ...]:
    spec = spec_from_file_location("on_threads", FOLDER / "on_threads.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FILES


@pytest.mark.parametrize("file", files())
def test_a_file_is_there(file):
    assert (FOLDER / file).exists()


def selection(stage: suite_stages.Stage) -> str:
    options = stage.options
    return options[options.index("-m") + 1] if "-m" in options else ""


@pytest.mark.parametrize("long", [False, True])
def test_what_mpirun_leaves_out_runs_on_threads(monkeypatch, long):
    monkeypatch.setattr(suite_stages, "can_simulate_gpus", lambda: True)
    stages = suite_stages.plan(long=long)
    threads = [stage for stage in stages if stage.name in ("threads 3", "gpu threads 3")]
    assert len(threads) == 2
    assert all(selection(stage).startswith("on_threads") for stage in threads)
    processes = [stage for stage in stages if stage.paths in (("tests/mpi",), ("tests/gpu",)) and stage.size]
    assert all(("not on_threads" in selection(stage)) != long for stage in processes if stage.name != "gpu 1")


def test_every_file_of_the_ranks_runs_at_some_size():
    left_out = [set(paths) for paths in suite_stages.LEFT_OUT.values()]
    assert set.intersection(*left_out) == set()
