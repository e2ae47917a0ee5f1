"""What asynchronous methods have done among processes is what their papers make of the same events."""

from __future__ import annotations

import pytest
from event_programs import Recorded, assert_replayed, record, slow_sgd
from paper_programs import Program
from verdicts import everyone

import mpisgd
from mpisgd import DiLoCo, Gossip, ParameterServer, config

STRATEGIES = [
    ParameterServer("async"),
    ParameterServer("async", push_every=2, pull_every=3),
    ParameterServer("ssp", staleness_steps=1),
    Gossip("ring", style="asynchronous"),
    Gossip("complete", style="asynchronous", every=2),
]


def recorded_by_all(program: Program, strategy: mpisgd.Strategy, more: int = 0) -> list[Recorded]:
    found: list[Recorded | None] = [None] * mpisgd.size()
    mpisgd.all_gather_object(found, record(program, strategy, seed=7, more=more))
    return [one for one in found if one is not None]


def check(strategy: mpisgd.Strategy, more: int = 0, close: float = 0.0) -> None:
    program = Program(size=mpisgd.size(), steps=12, dyadic=False, make=slow_sgd)
    found, said = recorded_by_all(program, strategy, more), ""
    try:
        assert_replayed(program, strategy, found, close=close)
    except (AssertionError, ValueError) as exc:
        said = f"{type(exc).__name__}: {exc}"
    everyone(not said, said)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_paper_repeats_what_happened_bit_for_bit(strategy):
    check(strategy)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_numbers_of_steps():
    check(STRATEGIES[0], more=3 * mpisgd.rank())


@pytest.mark.mpi(min_size=2)
def test_learners_at_their_own_pace():
    """Torch's outer SGD adds and multiplies in one operation."""
    check(DiLoCo(2, quorum=1, grace_s=0.002), more=3 * mpisgd.rank(), close=1e-12)


@pytest.mark.mpi(min_size=2)
def test_dedicated_servers():
    check(ParameterServer("async", servers=(mpisgd.size() - 1,)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=repr)
def test_shards_that_travel(strategy, monkeypatch):
    """Between hosts a shard is read and written by one-sided messages."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    check(strategy)
