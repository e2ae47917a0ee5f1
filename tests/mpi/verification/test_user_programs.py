"""`mpisgd.verify` on programs as users write them: right or wrong, and in which module."""

from __future__ import annotations

import pytest
import torch
from user_programs import RIGHT, WRONG, Program
from verdicts import everyone

import mpisgd


def verdict(program: Program) -> mpisgd.Verification:
    draw = torch.Generator().manual_seed(3)
    batches = [program.data(draw) for _ in range(4)]
    return mpisgd.verify(program.model, program.optimizer, program.loss, batches, **program.options)


IN_SHORT = ("frozen, unused, tied", "residual", "LSTM", "GPT, shared parameters", "sums by name", "bfloat16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.long) for name in RIGHT]
)
def test_a_right_program_is_equal(name):
    found = verdict(RIGHT[name])
    everyone(bool(found), str(found))


# What depends on the order of the examples differs from itself when they are turned round, so that a
# difference could be that of the order, too.


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_different_and_the_module_is_named(name):
    found = verdict(WRONG[name])
    everyone(not found, str(found))
    everyone(bool(found.undecided) == (name == "numbers of examples"), str(found))
    everyone(found.module == WRONG[name].module and found.what, str(found))
