"""Who of a host's ranks prints its traceback: one, also where that one is gone when the next comes."""

import os

import pytest

from mpisgd.job.excepthook import ExceptHook


@pytest.fixture
def ranks():
    """Three ranks of a host as far as this is concerned: descriptors of one file, each opened by itself."""
    first = os.memfd_create("floor")
    floors = [first, *(os.open(f"/proc/self/fd/{first}", os.O_RDWR) for _ in range(2))]
    made = []
    for floor in floors:
        hooks = ExceptHook.__new__(ExceptHook)
        hooks._floor = floor
        made.append(hooks)
    yield made
    for hooks in made:
        hooks.close()


def test_one_speaks(ranks):
    assert [hooks._claim() for hooks in ranks] == [True, False, False]


def test_nobody_speaks_after_one_who_is_gone(ranks):
    first, second, third = ranks
    assert second._claim()
    second.close()
    assert not first._claim()
    assert not third._claim()
