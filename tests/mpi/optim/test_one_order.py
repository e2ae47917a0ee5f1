"""`reproducible="ranks"` over MPI, also between hosts; tests/unit/gradients has all else, on threads."""

from __future__ import annotations

import one_order_programs as program
import pytest
import torch
from pretended_hosts import EVEN, group_of_hosts
from verdicts import everyone

import mpisgd


@pytest.mark.mpi(min_size=2)
def test_the_bits_are_those_of_one_process():
    if mpisgd.size() not in (2, 4):
        pytest.skip("for a power of two of ranks")
    wanted = program.in_one_process("SGD", 8, torch.bfloat16)
    options = {"reproducible": "ranks", "overlap": None}
    with group_of_hosts(EVEN[mpisgd.size()]) as hosts:
        for group in (None, hosts):
            mine = program.by_ranks("SGD", 8, torch.bfloat16, **options, group=group)
            everyone(program.are_equal(mine, wanted), f"{group}: {mine} {wanted}")
