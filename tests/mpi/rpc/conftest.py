"""RPC starts once for all files that use it: torch's RRefs belong to the first start in a process."""

from __future__ import annotations

import pytest
from verdicts import referee

from mpisgd import rpc


@pytest.fixture(scope="session")
def workers(job):
    """RPC runs; the names of the workers, by rank. The tests of its start end it (test_rpc_start.py)."""
    rpc.init_rpc()
    yield [f"worker{rank}" for rank in range(referee().size)]
    rpc.shutdown()
