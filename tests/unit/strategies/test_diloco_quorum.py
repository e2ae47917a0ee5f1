"""`DiLoCo(quorum=)`: learners at their own pace are what its paper makes of the same events."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from event_programs import Recorded, assert_replayed, one_step, record
from event_programs import wrapped as with_momentum
from paper_programs import LR, Program, by_mpisgd, momentum, sgd
from torch import Tensor, nn

import mpisgd
import mpisgd.checkpoint
from mpisgd import DiLoCo
from mpisgd.errors import CollectiveTimeout, InvalidArgument, PeerLost
from mpisgd.event_log import EventLog
from mpisgd.job.threads_as_ranks import LOST, lose_ranks, run_ranks
from mpisgd.methods.diloco.outer import OuterOptimizer
from mpisgd.methods.diloco.quorum.messages import Said
from mpisgd.methods.diloco.quorum.rounds import Rounds, Rule
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.threads import scheduling

CLOSE = 1e-12  # of the largest element: torch's outer SGD adds and multiplies in one operation
PROGRAM = Program(size=4, steps=12, dyadic=False, make=momentum)
wrapped = partial(with_momentum, check_start=False)
LATE = [  # a learner in PROGRAM pauses up to 0.04 s in a step
    DiLoCo(2, quorum=1, grace_s=0),
    DiLoCo(2, quorum=2, grace_s=0.005),
    DiLoCo(3, quorum=3, grace_s=0.001, weights="equal"),
    DiLoCo(2, quorum=2, grace_s=60),
]


def recorded(strategy: DiLoCo, seed: int, program: Program = PROGRAM) -> list[Recorded]:
    return run_ranks(program.size, lambda: record(program, strategy, seed), seed=seed)


@pytest.mark.parametrize("strategy", LATE, ids=repr)
def test_the_paper_repeats_what_happened(strategy):
    for seed in range(3):
        assert_replayed(PROGRAM, strategy, recorded(strategy, seed), close=CLOSE)


def test_schedules_have_rounds_of_few_and_learners_that_come_twice_to_one():
    seen = Counter()
    for seed in range(6):
        outer = recorded(LATE[1], seed)
        number_of = [entry.place.number for entry in outer[0].outer if entry.place]
        for rank, one in enumerate(outer):
            came = [entry.place.number for entry in one.entries if entry.what == "enter" and entry.place]
            rounds = [sum(number < each for number in number_of) for each in came]
            seen["twice"] += len(set(rounds)) < len(rounds)
            seen["late"] += any(rank not in entry.ranks for entry in outer[0].outer)
        seen["few"] += sum(len(entry.ranks) < PROGRAM.size for entry in outer[0].outer)
    assert min(seen[name] for name in ("few", "twice", "late")) > 0, seen


@pytest.mark.parametrize("make", [sgd, momentum])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_learners_of_equal_weights_are_diloco_to_the_last_bit(size, make):
    program = replace(PROGRAM, size=size, make=make, steps=7)
    for options in ({}, {"outer_options": {"lr": 0.5, "momentum": 0.25}}):
        together = by_mpisgd(program, strategy=DiLoCo(2, **options))
        alone = by_mpisgd(program, strategy=DiLoCo(2, quorum="all", **options))
        assert_same(together, alone)


def assert_same(expected: Any, found: Any) -> None:
    for mine, theirs in zip(expected, found, strict=True):
        for before, after in zip(mine, theirs, strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_learners_with_different_numbers_of_steps_end_with_the_same_parameters():
    for seed in range(3):
        found = run_ranks(4, lambda s=seed: record(PROGRAM, LATE[1], s, more=3 * mpisgd.rank()), seed=seed)
        assert_replayed(PROGRAM, LATE[1], found, close=CLOSE)
        for one in found[1:]:
            assert all(torch.equal(one.params[name], found[0].params[name]) for name in one.params)


# -- lost, stopped, slow -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_learner_that_is_lost_is_no_event_for_the_others(seed):
    """And counts with what it has brought: the paper repeats that, too."""
    strategy, gone = DiLoCo(2, quorum=2, grace_s=0.02), {}

    def die(step: int, so_far: Recorded) -> None:
        if (mpisgd.rank(), step) in ((1, 5), (3, 8)):
            gone[mpisgd.rank()] = copy.deepcopy(so_far)
            lose_ranks(mpisgd.rank())

    def train() -> Recorded:
        done = record(PROGRAM, strategy, seed, before_step=die)
        scheduling.sleep(0.2)  # all have noticed both losses: there is nothing that they end together
        return done

    found = run_ranks(4, train, seed=seed, losses=[])
    assert [one is LOST for one in found] == [False, True, False, True]
    both = [gone.get(rank, one) for rank, one in enumerate(found)]
    assert_replayed(PROGRAM, strategy, both, close=CLOSE)
    assert not {1, 3} & {rank for entry in found[0].outer[-2:] for rank in entry.ranks}


def stops(strategy: DiLoCo, stopped: int, at: int, pause_s: float, steps: int = 12) -> list[list[float]]:
    """Return how long each step has taken on each learner, of which one pauses before a step."""

    def train() -> list[float]:
        took, params = [], PROGRAM.start()
        optimizer: Any = mpisgd.DistributedOptimizer(sgd(list(params.values())), strategy=strategy)
        for step in range(steps):
            scheduling.sleep(pause_s if (mpisgd.rank(), step) == (stopped, at) else 0.01)
            PROGRAM.loss(params, 0, PROGRAM.terms(mpisgd.rank(), step)[0]).backward()
            began_s = scheduling.now_s()
            optimizer.step()
            took.append(scheduling.now_s() - began_s)
        optimizer.synchronizer.finish()
        return took

    return run_ranks(3, train, seed=2)


def test_nobody_waits_longer_than_the_grace_for_one_that_is_not_there():
    took = stops(DiLoCo(2, quorum=2, grace_s=0.5), stopped=1, at=5, pause_s=30.0)
    longest = [max(each) for each in took]
    assert 0.5 <= max(longest) < 0.6, longest
    assert longest[1] < 0.1, longest  # which comes late to a round of others, and goes on at once


class Paced(NamedTuple):
    """What learners of their own pace have done."""

    waited: list[list[float]]  # seconds that each of a learner's outer steps took it, by learner
    steps: list[list[int]]  # before each of these
    whose: list[tuple[int, ...]]  # each outer step is


def paced(
    steps: Sequence[int],
    pauses_s: Mapping[int, float],
    pace_s: Sequence[float] = (0.2, 0.2, 0.2),
    strategy: DiLoCo = DiLoCo(10, quorum=2, grace_s=0.5),  # noqa: B008
) -> Paced:
    """Train so many steps at a pace of so many seconds, by learner; learner 1 pauses in steps."""

    def train() -> Any:
        took, taken, params, rank = [], [0], PROGRAM.start(), mpisgd.rank()
        optimizer: Any = mpisgd.DistributedOptimizer(sgd(list(params.values())), strategy=strategy)
        method = optimizer.synchronizer
        method.events, method.outer_events = EventLog(), EventLog()
        for step in range(steps[rank]):
            scheduling.sleep(pace_s[rank] + (pauses_s.get(step, 0.0) if rank == 1 else 0.0))
            PROGRAM.loss(params, 0, PROGRAM.terms(rank, step)[0]).backward()
            began_s = scheduling.now_s()
            optimizer.step()
            taken[-1] += 1
            if sum(entry.what == "enter" for entry in method.events.entries) == len(taken):
                took.append(round(scheduling.now_s() - began_s, 2))
                taken.append(0)
        method.finish()
        return took, taken[:-1], [entry.ranks for entry in method.outer_events.entries]

    found = run_ranks(3, train, seed=2)
    return Paced([each[0] for each in found], [each[1] for each in found], found[0][2])


def test_one_that_is_stopped_is_waited_for_once():
    found = paced([100] * 3, {15: 30.0})
    assert [round(wait, 1) for wait in found.waited[0]] == [0.0, 0.5] + [0.0] * 8
    assert found.whose[1:10] == [(0, 2)] * 9


def test_one_that_is_stopped_again_before_it_is_in_step_is_waited_for_once_more():
    found = paced([100] * 3, {15: 1.3, 21: 30.0})
    assert [round(wait, 1) for wait in found.waited[0]] == [0.0, 0.5, 0.5] + [0.0] * 7
    assert found.whose[1:10] == [(0, 2), (0, 1, 2)] + [(0, 2)] * 7


def test_one_that_is_in_step_again_takes_all_its_steps_like_any_other():
    """The others wait for it, within the grace, where it is a little slower then."""
    found = paced([110] * 3, {15: 0.7, **dict.fromkeys(range(50, 110), 0.02)})
    assert set(found.steps[1][-5:-1]) == {10}
    assert {round(wait, 1) for wait in found.waited[0][-4:-1]} == {0.2}


HALF_STEP_S = 0.1  # of `paced`; so much earlier or later one comes that ends its round by the clock


@pytest.mark.parametrize("pause_s", [0.7, 1.3, 2.9])
def test_one_that_goes_on_is_in_step_with_the_others_at_the_next_outer_step(pause_s):
    """It brings what it has at its next step, and trains as long as the others do until they come."""
    found = paced([110] * 3, {15: pause_s})
    assert round(found.waited[0][1], 1) == 0.5
    assert max(found.waited[0][2:]) <= HALF_STEP_S + 0.02
    assert max(found.waited[1][1:]) <= HALF_STEP_S + 0.02
    missed = found.whose.count((0, 2))
    assert found.whose[: 1 + missed] == [(0, 1, 2), *[(0, 2)] * missed]
    assert set(found.whose[1 + missed : -2]) == {(0, 1, 2)}
    first, late, rest, *others = found.steps[1]
    assert (first, late <= 10, rest < 10) == (10, True, True)
    assert set(others[:-1]) <= {9, 10}
    assert set(found.steps[0]) == {10}


def test_one_of_half_the_pace_takes_half_as_many_steps_and_nobody_waits():
    found = paced([60] * 3, {}, pace_s=(0.2, 0.4, 0.2))
    assert round(found.waited[0][0], 1) == 0.5
    assert found.waited[0][1] <= 0.2  # half a step of learner 1
    assert max(found.waited[0][2:5]) < 0.05
    assert found.whose[:5] == [(0, 2), *[(0, 1, 2)] * 4]
    assert found.steps[1][2:5] == [5, 5, 5]
    assert set(found.steps[0]) == {10}


def test_learners_of_half_the_pace_take_all_their_steps_again_when_the_faster_one_has_finished():
    strategy = DiLoCo(10, quorum=1, grace_s=0.5)
    found = paced((20, 60, 60), {}, pace_s=(0.2, 0.4, 0.4), strategy=strategy)
    assert found.steps[0] == [10, 10]
    assert found.steps[1] == found.steps[2]
    assert found.steps[1][2:] == [5, 10, 10, 10, 10]
    assert max(found.waited[1]) < 0.15


def test_there_is_no_outer_step_of_late_changes_alone():
    """All others have finished; the steps stay out, as those do that one takes after its last outer step."""
    found = paced([20] * 3, {15: 3.0})
    assert found.whose == [(0, 1, 2), (0, 2)]
    assert found.steps[1] == [10, 6]  # and four more, which are not all its steps


def test_who_has_finished_is_told_which_learner_does_nothing():
    def train() -> str:
        params = PROGRAM.start()
        optimizer: Any = mpisgd.DistributedOptimizer(
            sgd(list(params.values())), strategy=DiLoCo(2, quorum=2, grace_s=0)
        )
        for step in range(4):
            PROGRAM.loss(params, 0, PROGRAM.terms(mpisgd.rank(), step)[0]).backward()
            optimizer.step()
        scheduling.sleep(30.0 if mpisgd.rank() == 1 else 0.0)
        try:
            optimizer.synchronizer.finish()
        except CollectiveTimeout as exc:
            return str(exc)
        return ""

    found = run_ranks(3, train, timeout_s=20.0, seed=2)
    for rank in (0, 2):
        assert "rank 1 has not called synchronizer.finish()" in found[rank], found
        assert "20.0 s" in found[rank]


def test_nobody_waits_where_all_have_come():
    took = stops(DiLoCo(2, quorum=2, grace_s=500), stopped=1, at=5, pause_s=0.02)
    assert max(max(each) for each in took) < 0.2, took


def test_learners_that_can_be_no_quorum_any_more_are_told():
    strategy = DiLoCo(2, quorum=3, grace_s=0.01)

    def die(step: int, so_far: Recorded) -> None:
        if mpisgd.rank() in (1, 2) and step == 4:
            lose_ranks(mpisgd.rank())

    found = run_ranks(4, lambda: record(PROGRAM, strategy, 1, before_step=die), losses=[])
    for rank in (0, 3):
        assert isinstance(found[rank], PeerLost)
        assert "quorum=3): 2 learners are left of 4" in str(found[rank])


def test_the_loss_of_the_outer_parameters_is_told():
    def die(step: int, so_far: Recorded) -> None:
        if (mpisgd.rank(), step) == (0, 4):
            lose_ranks(0)

    found = run_ranks(3, lambda: record(PROGRAM, LATE[1], 1, before_step=die), losses=[])
    for one in found[1:]:
        assert isinstance(one, PeerLost)
        assert "rank 0 was lost, which has the outer parameters" in str(one)


# -- saved and loaded ----------------------------------------------------------------------------------


def test_a_training_that_is_saved_goes_on_as_if_it_was_not():
    """Where nobody is late, so that both have the same events; saved in a round, and between two."""
    strategy = DiLoCo(3, quorum=3, grace_s=0.5, outer_optimizer=torch.optim.Adam)

    def train(saved_at: int) -> list[dict[str, Tensor]]:
        params, rows = PROGRAM.start(), []
        optimizer = wrapped(params, strategy)
        for step in range(11):
            if step == saved_at:
                saved = copy.deepcopy((dict(params), optimizer.state_dict()))
                params, optimizer = saved[0], wrapped(saved[0], strategy)
                optimizer.load_state_dict(saved[1])
            one_step(PROGRAM, params, optimizer, step)
            version = torch.tensor(optimizer.synchronizer.state.version)  # by which who is late is known
            rows.append({**{name: param.detach().clone() for name, param in params.items()}, "": version})
        return rows

    expected = run_ranks(3, lambda: train(-1))
    for saved_at in (5, 6):
        assert_same(expected, run_ranks(3, lambda at=saved_at: train(at)))


def test_a_checkpoint_has_all_of_it(tmp_path):
    strategy = DiLoCo(3, quorum=2, grace_s=5)

    def train(folder: Path, begin: int = 0, saved_at: int = -1) -> list[dict[str, Tensor]]:
        model, rows = nn.ParameterDict(PROGRAM.start()), []
        optimizer = wrapped(dict(model.items()), strategy)
        if begin:
            mpisgd.checkpoint.load(folder, model=model, optimizer=optimizer)
        for step in range(begin, 8):
            if step == saved_at:
                mpisgd.checkpoint.save(folder, step, model=model, optimizer=optimizer)
            one_step(PROGRAM, dict(model.items()), optimizer, step)
            rows.append({name: param.detach().clone() for name, param in model.items()})
        return rows

    for step in (4, 6):
        folder = tmp_path / str(step)
        expected = run_ranks(3, lambda at=step, f=folder: train(f, saved_at=at))
        found = run_ranks(3, lambda at=step, f=folder: train(f, begin=at))
        assert_same([rows[step:] for rows in expected], found)


def test_what_has_arrived_for_an_open_round_is_saved_and_counts():
    """Learner 2 is late, goes on, and all save before its change is in an outer step."""
    strategy, states = DiLoCo(2, quorum=2, grace_s=5), {}

    def train(loads: bool) -> list[dict[str, Tensor]]:
        params = PROGRAM.start()
        optimizer = wrapped(params, strategy)
        for step in range(2):
            scheduling.sleep(6.0 * (mpisgd.rank() == 2) * step)
            one_step(PROGRAM, params, optimizer, step)
        mpisgd.barrier()
        if loads:
            states[mpisgd.rank()] = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(states[mpisgd.rank()])
        for step in range(2, 4):
            scheduling.sleep(1.0 * (mpisgd.rank() == 2))
            one_step(PROGRAM, params, optimizer, step)
        optimizer.synchronizer.finish()
        return [{name: param.detach().clone() for name, param in params.items()}]

    assert_same(run_ranks(3, lambda: train(False)), run_ranks(3, lambda: train(True)))
    own = [states[rank]["mpisgd"]["own"] for rank in range(3)]
    assert [each["learner"] for each in own[0]["outer"]["pending"]] == [2]
    assert [one["version"] for one in own] == [1, 1, 1]
    assert own[1]["outer"] == own[2]["outer"] == {}


def test_one_that_is_steps_behind_comes_to_the_save_for_which_the_others_wait():
    """They come to no outer step meanwhile, and it does not wait for one; what it brings counts after it."""
    strategy = DiLoCo(2, quorum=2, grace_s=0.1)

    def train(loads: bool) -> Any:
        params, rank = PROGRAM.start(), mpisgd.rank()
        optimizer = wrapped(params, strategy)
        for step in range(12):
            scheduling.sleep(0.1 + 2.0 * ((rank, step) == (2, 1)))
            if step == 8:
                saved = copy.deepcopy(optimizer.state_dict())
                mpisgd.barrier()
                if loads:
                    optimizer.load_state_dict(saved)
            one_step(PROGRAM, params, optimizer, step)
        optimizer.synchronizer.finish()
        return [{name: param.detach().clone() for name, param in params.items()}], saved["mpisgd"]["own"]

    once, again = (run_ranks(3, lambda each=loads: train(each), timeout_s=30.0) for loads in (False, True))
    pending = [each["learner"] for each in once[0][1]["outer"]["pending"]]
    assert pending
    assert set(pending) == {2}
    assert_same([each[0] for each in once], [each[0] for each in again])


def test_who_is_let_go_trains_again_by_now():
    form = FlatCopy([torch.zeros(3)])
    outer = OuterOptimizer(DiLoCo(2)._outer_choice, {"x": form.tensors[0]}, {}, {})
    rounds = Rounds(Rule(1, 0.0, True), ["x"], form, outer, size=2)
    rounds.enter(1, Said(steps=2, examples=2), form.new_like())
    assert rounds.is_over({0, 1}, 0.0)
    rounds.let_go(1)
    assert not rounds.is_over({0, 1}, 0.0)


def test_a_learner_that_comes_twice_counts_once_whoever_has_counted_its_examples():
    """With equal weights a learner that counted examples before one time only had the weight of two."""
    form = FlatCopy([torch.zeros(2)])
    choice = DiLoCo(2, outer_options={"lr": 1.0, "momentum": 0.0})._outer_choice
    outer = OuterOptimizer(choice, {"x": form.tensors[0]}, {}, {})
    rounds = Rounds(Rule(1, 0.0, False), ["x"], form, outer, size=2)
    for learner, moved, is_counted in ((0, 2.0, 0), (1, 8.0, 1), (1, 16.0, 0)):
        copy_of_mine = form.new_like()
        copy_of_mine.tensors[0].fill_(moved)
        rounds.enter(learner, Said(steps=1, examples=1, is_counted=is_counted), copy_of_mine)
    assert rounds.step(0.0) == (0, 1)
    assert form.tensors[0].tolist() == [13.0, 13.0]


def test_the_outer_parameters_from_which_those_began_that_are_behind_are_saved():
    """Learner 0 is late once, so that the others are at the step of the save without an outer step there."""
    strategy = DiLoCo(6, quorum=1, grace_s=1.0, weights="equal", outer_options={"lr": 1.0, "momentum": 0.0})

    def train() -> Any:
        params, rank = PROGRAM.start(), mpisgd.rank()
        optimizer: Any = mpisgd.DistributedOptimizer(sgd(list(params.values())), strategy=strategy)
        for step in range(20):
            scheduling.sleep(0.1 + 1.42 * ((rank, step) == (0, 1)))
            one_step(PROGRAM, params, optimizer, step)
            if step == 17:
                began = copies(params)
        saved = copy.deepcopy(optimizer.state_dict())
        mpisgd.barrier()
        optimizer.load_state_dict(saved)
        if rank:
            method, step, version = optimizer.synchronizer, 20, optimizer.synchronizer.state.version
            while method.state.version == version:  # it is told soon that it is behind
                before = copies(params)
                one_step(PROGRAM, params, optimizer, step)
                x = {name: before[name] - LR * param.grad for name, param in params.items()}
                scheduling.sleep(0.1)
                step += 1
            assert step <= 22  # all its steps would be two more
        else:
            optimizer.zero_grad()
            for _ in range(6):
                optimizer.step()  # changes nothing
                scheduling.sleep(0.3)  # the others come late in the meantime
            x = {}
        optimizer.synchronizer.finish()
        return began, x, saved["mpisgd"]["own"], copies(params)

    found = run_ranks(3, train)
    outer = found[0][2]["outer"]
    assert dict(outer["based"]) == {0: outer["version"], 1: outer["version"] - 1, 2: outer["version"] - 1}
    assert [version for version, _ in outer["bases"]] == [outer["version"] - 1]
    for place, name in enumerate(PROGRAM.start()):
        z3, z4 = outer["bases"][0][1][place], outer["newest"][place]
        assert all(torch.equal(z3, one[0][name]) for one in found[1:])
        mean = sum(z3 - one[1][name] for one in found[1:]) / 3
        for one in found:
            assert torch.allclose(one[3][name], z4 - mean, rtol=1e-12, atol=1e-12)


def copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def test_what_the_first_rank_saves_has_the_changes_of_learners_that_come_after_it():
    """All save after step 2. Learners 0 and 3 are late, and 3 comes when 0 is at its save."""
    strategy = DiLoCo(2, quorum=2, grace_s=0)

    def train() -> Any:
        params = PROGRAM.start()
        optimizer = wrapped(params, strategy)
        one_step(PROGRAM, params, optimizer, 0)
        scheduling.sleep({0: 0.1, 3: 0.5}.get(mpisgd.rank(), 0.0))
        one_step(PROGRAM, params, optimizer, 1)
        return copy.deepcopy(optimizer.state_dict())["mpisgd"]["own"]

    own = run_ranks(4, train)
    assert [one["version"] for one in own] == [1, 1, 1, 1]
    arrived = [each["learner"] for each in own[0]["outer"]["pending"]]
    assert (own[0]["outer"]["version"], arrived) in ((1, [0, 3]), (2, []))


@pytest.mark.parametrize("pause_s", [2.0, 0.1], ids=["late once", "of half the pace"])
@pytest.mark.parametrize("quorum", [1, 2, 3])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_what_learners_bring_after_their_save_is_no_part_of_that_of_the_first_rank(slow, quorum, pause_s):
    """All save before step 8, to which one learner comes late: the others were in outer steps by then."""
    strategy, num_ranks = DiLoCo(2, quorum=quorum, grace_s=0.15, weights="equal"), 3

    def save() -> Any:
        params, rank = PROGRAM.start(), mpisgd.rank()
        optimizer = wrapped(params, strategy)
        for step in range(16):
            scheduling.sleep(0.1 + pause_s * (rank == slow and (pause_s < 1 or step == 7)))
            if step == 8:
                saved = copy.deepcopy((params, optimizer.state_dict()))
            one_step(PROGRAM, params, optimizer, step)
        optimizer.synchronizer.finish()
        return saved

    def load() -> list[dict[str, Tensor]]:
        params, state = copy.deepcopy(saved[mpisgd.rank()])
        optimizer = wrapped(params, strategy)
        optimizer.load_state_dict(state)
        for step in range(8, 16):
            one_step(PROGRAM, params, optimizer, step)
        optimizer.synchronizer.finish()
        return [copies(params)]

    saved = run_ranks(num_ranks, save)
    own = [state["mpisgd"]["own"] for _, state in saved]
    outer = own[0]["outer"]
    assert dict(outer["based"]) == {rank: own[rank]["version"] for rank in range(num_ranks)}
    known = {outer["version"], *(version for version, _ in outer["bases"])}
    assert {one["version"] for one in own} <= known
    first, *others = run_ranks(num_ranks, load)
    assert_same([first] * len(others), others)


# -- what goes, and what is refused --------------------------------------------------------------------


def test_buffers_are_averaged_with_the_parameters():
    def train(strategy: DiLoCo) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
        for place, param in enumerate(model.parameters()):
            param.data = torch.linspace(-1, 1 + place, param.numel()).view_as(param).double()
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            strategy=strategy,
            named_buffers=model.named_buffers(),
        )
        draw = torch.Generator().manual_seed(mpisgd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=draw, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        own = [tensor.clone() for tensor in model.state_dict().values()]
        with optimizer.consensus():
            return [*own, *(tensor.clone() for tensor in model.state_dict().values())]

    together = run_ranks(3, lambda: train(DiLoCo(2)))
    alone = run_ranks(3, lambda: train(DiLoCo(2, quorum="all")))
    for mine, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(before, after) for before, after in zip(mine, theirs, strict=True))


def test_muon_inside():
    def train(strategy: DiLoCo) -> list[Tensor]:
        params = [nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8)), nn.Parameter(torch.ones(8, 8))]
        optimizer: Any = mpisgd.DistributedOptimizer(torch.optim.Muon(params, lr=0.02), strategy=strategy)
        for step in range(5):
            optimizer.zero_grad()
            (params[0] @ params[1] - mpisgd.rank() - step).square().mean().backward()
            optimizer.step()
        return [param.detach().clone() for param in params]

    together, alone = (
        run_ranks(3, lambda s=strategy: train(s)) for strategy in (DiLoCo(2), DiLoCo(2, quorum="all"))
    )
    for mine, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(before, after) for before, after in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overlap_steps": 1}, "overlap_steps=1 does not go with quorum=2"),
        ({"fragments": 2}, "fragments=2 does not go with quorum=2"),
        ({"quorum": 0}, "quorum=0; expected a number of learners"),
        ({"quorum": 1.0}, "quorum=1.0; expected a number of learners"),
        ({"quorum": None, "grace_s": 1}, "grace_s=1 goes with quorum="),
        ({"quorum": None, "weights": "equal"}, "weights='equal' goes with quorum="),
        ({"weights": "bytes"}, "weights='bytes'; expected one of"),
        ({"grace_s": -1.0}, "grace_s=-1.0; expected a positive"),
    ],
)
def test_what_does_not_go_is_refused(options, text):
    with pytest.raises(InvalidArgument, match=text):
        DiLoCo(2, **{"quorum": 2, **options})


def refusals(program: Any, size: int = 2) -> list[str]:
    """Return what each rank has raised."""

    def train() -> str:
        with pytest.raises(InvalidArgument) as caught:
            program(PROGRAM.start())
        return str(caught.value)

    return run_ranks(size, train)


def assert_refused(program: Any, text: str) -> None:
    """Fail unless every rank has raised this."""
    assert all(text in told for told in refusals(program))


def test_more_learners_than_ranks_are_refused():
    assert_refused(lambda params: wrapped(params, DiLoCo(2, quorum=3)), "quorum=3, and there are 2 learners")


def test_compression_is_refused():
    def compress(params: dict[str, nn.Parameter]) -> None:
        mpisgd.DistributedOptimizer(
            sgd(list(params.values())),
            strategy=DiLoCo(2, quorum=2),
            compression=mpisgd.Compression.bf16,
        )

    assert_refused(compress, "what a rank sends travels as it is")


def test_added_parameters_are_refused():
    def add(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum=2))
        one_step(PROGRAM, params, optimizer, 0)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    assert_refused(add, "parameters cannot be added")


def test_other_ranks_are_refused():
    def rebuild(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum=2))
        one_step(PROGRAM, params, optimizer, 0)
        optimizer.rebuild()

    assert_refused(rebuild, "leave elastic.run and rebuild() out")


def test_a_state_of_other_ranks_is_refused():
    def load(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum="all"))
        one_step(PROGRAM, params, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["mpisgd"]["size"] += mpisgd.rank()  # as another number of ranks has it, on one of them
        optimizer.load_state_dict(saved)
        one_step(PROGRAM, params, optimizer, 1)

    assert_refused(load, "of another number of ranks, or of one rank alone")


def test_a_state_of_another_save_is_refused():
    def load(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum="all"))
        for step in range(3):
            one_step(PROGRAM, params, optimizer, step)
        saved = copy.deepcopy(optimizer.state_dict())
        mpisgd.barrier()
        saved["mpisgd"]["own"]["version"] -= mpisgd.rank()
        optimizer.load_state_dict(saved)
        one_step(PROGRAM, params, optimizer, 3)

    assert_refused(load, "let each rank load what it has saved, all of them at the same step")


def counts(numbers: Sequence[Sequence[int]], weights: str = "tokens") -> Any:
    """Return a program whose learners count so many examples in each step; 0: none."""

    def train(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum="all", weights=weights))
        for step, number in enumerate(numbers[mpisgd.rank()]):
            PROGRAM.loss(params, 0, PROGRAM.terms(0, step)[0]).backward()
            if number:
                optimizer.synchronizer.next_batch(examples=number)
            optimizer.step()
        optimizer.synchronizer.finish()

    return train


def test_examples_are_counted_by_all_or_by_none():
    assert_refused(counts([[3, 3], [0, 0]]), "others have not")
    assert_refused(counts([[3, 0], [0, 3]]), "before some of the steps")
    run_ranks(2, lambda: counts([[3, 3], [0, 0]], weights="equal")(PROGRAM.start()))


def test_a_step_after_the_end_is_refused():
    def go_on(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum=2))
        one_step(PROGRAM, params, optimizer, 0)
        optimizer.synchronizer.finish()
        one_step(PROGRAM, params, optimizer, 1)

    assert_refused(go_on, "after synchronizer.finish()")
