"""torch's default process group of this run: the backend "mpisgd" over all its ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from verdicts import referee

GROUPS = ("default", "half", "reversed")


@pytest.fixture(scope="session", autouse=True)
def default_group() -> Iterator[None]:
    """Every test here finds the default group made; the last one leaves it destroyed."""
    dist.init_process_group("mpisgd")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def process_groups(default_group: None) -> dict[str, dist.ProcessGroup]:
    """The process groups that a test body can run on; of the halves, the one this rank is in."""
    ranks = range(dist.get_world_size())
    return {
        "default": dist.group.WORLD,
        "half": dist.new_group(list(ranks[dist.get_rank() % 2 :: 2]), use_local_synchronization=True),
        "reversed": dist.new_group(list(ranks[::-1]), sort_ranks=False),
    }


@pytest.fixture(params=GROUPS)
def pg(request: pytest.FixtureRequest, process_groups: dict[str, dist.ProcessGroup]) -> dist.ProcessGroup:
    """A process group that this rank is in; every rank is in one of the kind."""
    return process_groups[request.param]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of all ranks, made by one: pytest's own are swept up by all of them at the end, at once."""
    name = tempfile.mkdtemp() if dist.get_rank() == 0 else None
    yield Path(referee().bcast(name))
    referee().barrier()
    if name is not None:
        shutil.rmtree(name)
