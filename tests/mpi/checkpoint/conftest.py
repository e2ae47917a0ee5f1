"""A folder of the whole job, and groups of other sizes than the job's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from verdicts import referee

if TYPE_CHECKING:
    from mpisgd import Group


@pytest.fixture
def folder() -> Iterator[Path]:
    """Made by one rank and removed by it: pytest's own are swept up by all of them at the end, at once."""
    name = tempfile.mkdtemp() if referee().rank == 0 else None
    yield Path(referee().bcast(name)) / "saved"
    referee().barrier()
    if name is not None:
        shutil.rmtree(name)


@pytest.fixture(scope="session")
def alone(job: None) -> Group:
    """A group of this rank only."""
    import mpisgd

    return [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]
