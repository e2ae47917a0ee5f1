"""What asynchronous methods have done, under many schedules, is what their papers make of the same events."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch
from event_programs import Recorded, assert_replayed, paper_of_events, record, replay, slow_sgd
from paper_programs import Program, sgd

import mpisgd
from mpisgd import Gossip, ParameterServer
from mpisgd.errors import InvalidArgument
from mpisgd.event_log import EventLog
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.tools.verification.replay import in_order

SEEDS = range(6)
REPLAYED = SEEDS if "MPISGD_TEST_LONG" in os.environ else SEEDS[:3]  # two, three and four ranks
STRATEGIES = [
    ParameterServer("async"),
    ParameterServer("async", push_every=2, pull_every=3),
    ParameterServer("ssp", staleness_steps=1),
    ParameterServer("ssp", staleness_steps=0),
    ParameterServer("async", servers=(0,)),
    Gossip("ring", style="asynchronous"),
    Gossip("complete", style="asynchronous", every=2),
]
PROGRAM = Program(size=3, steps=5, dyadic=False, make=slow_sgd)


def recorded(program: Program, strategy, seed: int) -> list[Recorded]:
    return run_ranks(program.size, lambda: record(program, strategy, seed), seed=seed)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_paper_repeats_what_happened_bit_for_bit(strategy):
    for seed in REPLAYED:
        program = replace(PROGRAM, size=2 + seed % 3)
        assert_replayed(program, strategy, recorded(program, strategy, seed))


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[1], STRATEGIES[5]], ids=repr)
def test_ranks_with_different_numbers_of_steps(strategy):
    """Ranks of gossip begin apart, too; those of a server begin with the parameters of the first."""
    program = replace(PROGRAM, size=4, apart=isinstance(strategy, Gossip))
    for seed in REPLAYED:
        found = run_ranks(4, lambda s=seed: record(program, strategy, s, mpisgd.rank()), seed=seed)
        assert_replayed(program, strategy, found)


def orders(strategy, seeds) -> set[tuple]:
    """What happened in what order, by schedule."""
    found = set()
    for seed in seeds:
        logs = {rank: one.entries for rank, one in enumerate(recorded(PROGRAM, strategy, seed))}
        found.add(tuple((event.what, event.ranks, event.names) for event in in_order(logs)))
    return found


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[5]], ids=repr)
def test_schedules_differ_in_what_happens(strategy):
    assert len(orders(strategy, range(6))) >= 5


def test_a_step_comes_between_the_ask_and_the_take():
    """Else the exchanges that were seen would be atomic."""
    for seed in SEEDS:
        for one in recorded(PROGRAM, STRATEGIES[5], seed):
            kinds = [entry.what for entry in one.entries]
            if any(pair == ("ask", "step") for pair in itertools.pairwise(kinds)):
                return
    pytest.fail("no step came between")


def test_a_log_that_lacks_an_entry_cannot_be_put_in_order_or_ends_elsewhere():
    found = recorded(PROGRAM, STRATEGIES[0], 3)
    changed = next(i for i, entry in enumerate(found[1].entries) if entry.what == "push")
    found[1] = found[1]._replace(entries=found[1].entries[:changed] + found[1].entries[changed + 1 :])
    with pytest.raises(AssertionError):
        assert_replayed(PROGRAM, STRATEGIES[0], found)


def test_entries_of_which_each_waits_for_the_other_have_no_order():
    found = recorded(PROGRAM, STRATEGIES[0], 3)
    logs = {rank: list(reversed(one.entries)) for rank, one in enumerate(found)}
    with pytest.raises(InvalidArgument, match="lack"):
        list(in_order(logs))


def test_a_bound_that_was_not_kept_is_found():
    """Without one a rank comes to be more than a step ahead in some schedule."""
    tight = paper_of_events(ParameterServer("ssp", staleness_steps=0), PROGRAM.size)

    def replay_all() -> None:
        for seed in SEEDS:
            replay(PROGRAM, tight, dict(enumerate(recorded(PROGRAM, STRATEGIES[0], seed))))

    with pytest.raises(ValueError, match="the ranks have pushed"):
        replay_all()


def test_nothing_is_recorded_by_default(monkeypatch):
    def refuse(*_):
        raise AssertionError("a log was written to")

    monkeypatch.setattr(EventLog, "add", refuse)

    def train() -> None:
        program = Program(size=2, steps=2, dyadic=False, make=sgd)
        for strategy in (STRATEGIES[0], STRATEGIES[5]):
            params = program.start(mpisgd.rank())
            optimizer = mpisgd.DistributedOptimizer(
                sgd(list(params.values())), params.items(), strategy=strategy
            )
            for step in range(2):
                for term in program.terms(mpisgd.rank(), step):
                    program.loss(params, mpisgd.rank(), term).backward()
                optimizer.step()
            optimizer.rebuild()

    run_ranks(2, train)


def test_gradients_of_a_log_are_copies():
    (one,) = run_ranks(1, lambda: record(replace(PROGRAM, size=1), STRATEGIES[0]))
    steps = [entry for entry in one.entries if entry.what == "step"]
    assert len(steps) == PROGRAM.steps
    assert not torch.equal(steps[0].g["matrix"], steps[1].g["matrix"])
