"""Some random programs on ranks that are threads."""

from __future__ import annotations

import pytest
from fuzzing.draw import draw

from mpisgd.tools.verification.programs.python_text import python_text
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

NUM_PROGRAMS = 30
FIRST_SEED = 1_000


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_PROGRAMS, 10))
def test_random_programs_equal_one_process(first):
    backend = ThreadsBackend()
    for seed in range(first, first + 10):
        program = draw(seed)
        verdict = backend.run(program)
        assert not verdict.is_fault, f"{verdict.kind}: {verdict.text}\n{python_text(program)}"


def test_a_schedule_repeats():
    backend = ThreadsBackend()
    program = draw(FIRST_SEED, 3, 2)
    assert backend.run(program) == backend.run(program)
