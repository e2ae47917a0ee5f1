"""Which tests of tests/mpi `scripts/test` runs on ranks that are threads, and not under mpirun.

What these files say does not depend on MPI: a case is as well on threads, where no rank waits for a core and
the schedule is drawn. The first case of each test stays under mpirun, and so does what patches the process or
looks at it. With --long all run under mpirun as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

__all__ = ["FILES", "mark_on_threads"]

FILES = (
    "compress/test_error_feedback.py",
    "compress/test_overflow.py",
    "compress/test_sign_compressors.py",
    "compress/test_two_step_exchange.py",
    "optim/test_agreement.py",
    "optim/test_compressed_momentum.py",
    "optim/test_gradients.py",
    "optim/test_models.py",
    "optim/test_optimizers.py",
    "optim/test_several_optimizers.py",
    "optim/test_sharded.py",
    "optim/test_shared_parameters.py",
    "optim/test_small_parameters.py",
    "optim/test_starting_equal.py",
    "sharding/test_offload.py",
    "sharding/test_resumed_runs.py",
    "sharding/test_sharding_regressions.py",
    "strategies/test_state.py",
)


def mark_on_threads(items: Sequence[pytest.Item]) -> None:
    """Give them the mark `on_threads`."""
    met = set()
    for item in items:
        file = item.path.as_posix().rpartition("tests/mpi/")[2]
        if file not in FILES or item.get_closest_marker("long") or item.get_closest_marker("processes"):
            continue
        function = item.nodeid.partition("[")[0]
        if function in met:
            item.add_marker("on_threads")
        met.add(function)
