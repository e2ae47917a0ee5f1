"""RPC starts once for a file that uses it, and ends with it: both are collective."""

from __future__ import annotations

import pytest
from verdicts import referee

from mpisgd import rpc


@pytest.fixture(scope="module")
def workers(job):
    """RPC runs; the names of the workers, by rank."""
    rpc.init_rpc()
    yield [f"worker{rank}" for rank in range(referee().size)]
    rpc.shutdown()
