"""`DiLoCo(quorum=, learners=)`: learners of several ranks, which have one model, and end as a whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from event_programs import Recorded, assert_replayed, one_step, record, wrapped
from paper_programs import Program, Terms, assert_equal, by_mpisgd, momentum, sgd
from torch import Tensor, nn

import mpisgd
from mpisgd import DiLoCo
from mpisgd.core.topology import Topology
from mpisgd.errors import CollectiveTimeout, InvalidArgument, LearnerLost
from mpisgd.event_log import EventLog
from mpisgd.job.threads_as_ranks import LOST, RankFailed, lose_ranks, run_ranks
from mpisgd.methods.diloco.quorum.one_model import learners_of
from mpisgd.threads import scheduling

CLOSE = 1e-12  # of the largest element: torch's outer SGD adds and multiplies in one operation
EXACT = {"lr": 0.5, "momentum": 0.25}  # of the outer SGD
HOSTS = (2, 2, 2)
PROGRAM = Program(size=6, hosts=HOSTS, steps=12, dyadic=False, make=momentum)
LATE = DiLoCo(2, quorum=1, grace_s=0.02, learners="host")
SHAPES = [((2, 2), "host"), ((1, 3), "host"), ((4,), "host"), ((1, 1), "host"), ((4,), 2), ((2, 4), 2)]


@dataclass(frozen=True)
class Joined(Program):
    """What learners of two ranks each train: the mean of their losses."""

    def loss(self, params: Mapping[str, Tensor], rank: int, term: Mapping[str, Tensor]) -> Tensor:
        mine = [PROGRAM.loss(params, each, PROGRAM.terms(each, self._step)[0]) for each in ranks_of(rank)]
        return torch.stack(mine).mean()

    def terms(self, rank: int, step: int) -> Terms:
        object.__setattr__(self, "_step", step)
        return [{}]


JOINED = Joined(size=3, steps=12, dyadic=False, make=momentum)


def ranks_of(learner: int) -> tuple[int, int]:
    return 2 * learner, 2 * learner + 1


# -- what they compute ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, momentum])
@pytest.mark.parametrize(("hosts", "learners"), SHAPES, ids=repr)
def test_all_learners_of_equal_weights_are_diloco_with_synchronous_steps_inside_bit_for_bit(
    hosts, learners, make
):
    program = Program(size=sum(hosts), hosts=hosts, make=make)
    for weights in ("equal", "tokens"):
        strategy = DiLoCo(2, quorum="all", weights=weights, learners=learners, outer_options=EXACT)
        assert_equal(program, strategy=strategy)


def test_learners_of_one_rank_are_those_of_before():
    program = replace(PROGRAM, size=3, hosts=())
    one, other = (
        by_mpisgd(program, strategy=DiLoCo(2, quorum="all", learners=learners)) for learners in ("rank", 1)
    )
    assert_same(one, other)


def assert_same(expected: Any, found: Any) -> None:
    for mine, theirs in zip(expected, found, strict=True):
        for before, after in zip(mine, theirs, strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("seed", range(3))
def test_the_paper_repeats_what_learners_of_several_ranks_have_done(seed):
    """Their tokens are counted together; their ranks have the same bits after every step."""
    found = run_ranks(6, lambda: record(PROGRAM, LATE, seed), seed=seed, ranks_per_host=HOSTS)
    for learner in range(3):
        first, other = (found[rank] for rank in ranks_of(learner))
        assert_same([first.after], [other.after])
        assert not other.entries
    assert_replayed(JOINED, LATE, found[::2], close=CLOSE)


def test_some_rounds_have_no_part_of_some_learner():
    found = [
        run_ranks(6, lambda s=seed: record(PROGRAM, LATE, s), seed=seed, ranks_per_host=HOSTS)
        for seed in range(3)
    ]
    assert min(len(entry.ranks) for each in found for entry in each[0].outer) < 3


def test_settings_are_compared_among_the_ranks_of_a_learner_alone():
    """Every 100 steps, which the other learners come to at other times."""

    def train() -> list[dict[str, Tensor]]:
        params = PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(50, quorum=1, grace_s=0, learners="host"))
        for step in range(120 if mpisgd.rank() < 2 else 60):
            scheduling.sleep(0.01)
            one_step(PROGRAM, params, optimizer, step)
        optimizer.synchronizer.finish()
        return [{name: param.detach().clone() for name, param in params.items()}]

    found = run_ranks(4, train, ranks_per_host=(2, 2), timeout_s=20.0)
    assert_same(found[:1] * 3, found[1:])


def test_a_closure_has_the_gradients_of_all_ranks_of_a_learner():
    def train(by_closure: bool) -> list[dict[str, Tensor]]:
        params = PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(2, quorum="all", weights="equal", learners="host"))
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = PROGRAM.loss(params, mpisgd.rank(), PROGRAM.terms(mpisgd.rank(), step)[0])
                loss.backward()
                return loss.detach()

            if by_closure:
                optimizer.step(torch.enable_grad()(closure))
            else:
                closure()
                optimizer.step()
        return [{name: param.detach().clone() for name, param in params.items()}]

    one, other = (run_ranks(4, lambda c=c: train(c), ranks_per_host=(2, 2)) for c in (False, True))
    assert_same(one, other)


def test_ranks_that_begin_differently_have_the_model_of_the_first_one_of_their_learner():
    def train() -> list[dict[str, Tensor]]:
        params = replace(PROGRAM, apart=True).start(mpisgd.rank())
        optimizer = wrapped(params, DiLoCo(2, quorum="all", learners="host"), check_start=False)
        one_step(PROGRAM, params, optimizer, 0)
        begun = {name: param.detach().clone() for name, param in params.items()}
        for step in range(1, 4):
            one_step(PROGRAM, params, optimizer, step)
        return [begun, {name: param.detach().clone() for name, param in params.items()}]

    found = run_ranks(4, train, ranks_per_host=(2, 2))
    for rank in (1, 3):
        assert_same([found[rank]], [found[rank - 1]])


def test_tokens_are_those_of_all_ranks_of_a_learner():
    def train() -> tuple[list[int], list[int]]:
        params = PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(3, quorum="all", learners="host"))
        optimizer.synchronizer.events, counted = EventLog(), []
        for step in range(2):
            PROGRAM.loss(params, 0, PROGRAM.terms(0, step)[0]).backward()
            optimizer.synchronizer.next_batch(examples=1 + mpisgd.rank())
            optimizer.step()
            counted.append(optimizer.synchronizer.state.examples)
        entries = optimizer.synchronizer.events.entries
        return counted, [int(entry.g["examples of the step"]) for entry in entries if entry.what == "step"]

    found = run_ranks(4, train, ranks_per_host=(2, 2))
    assert [counted for counted, _ in found] == [[3, 6], [3, 6], [7, 14], [7, 14]]
    assert [steps for _, steps in found] == [[3, 3], [], [7, 7], []]


def test_two_optimizers_of_learners_that_take_different_numbers_of_steps():
    def train() -> list[dict[str, Tensor]]:
        params = PROGRAM.start()
        halves = [dict(list(params.items())[:2]), dict(list(params.items())[2:])]
        optimizers = [wrapped(half, DiLoCo(2, quorum=1, grace_s=0, learners="host")) for half in halves]
        for step in range(8 if mpisgd.rank() < 2 else 3):
            scheduling.sleep(0.05)
            for optimizer in optimizers:
                optimizer.zero_grad()
            PROGRAM.loss(params, mpisgd.rank(), PROGRAM.terms(mpisgd.rank(), step)[0]).backward()
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.synchronizer.finish()
        return [{name: param.detach().clone() for name, param in params.items()}]

    found = run_ranks(4, train, ranks_per_host=(2, 2), timeout_s=20.0)
    assert_same(found[:1] * 3, found[1:])


def test_buffers_are_averaged_over_the_ranks_of_a_learner_and_over_learners():
    def train() -> Tensor:
        model = nn.BatchNorm1d(3, affine=True).double()
        optimizer: Any = mpisgd.DistributedOptimizer(
            sgd(list(model.parameters())),
            strategy=DiLoCo(1, quorum="all", learners="host"),
            named_buffers=model.named_buffers(),
        )
        model(torch.full((4, 3), float(mpisgd.rank()), dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.running_mean

    found = run_ranks(4, train, ranks_per_host=(1, 3))
    of_hosts = torch.tensor([0.0, (1 + 2 + 3) / 3], dtype=torch.float64) * 0.1
    assert all(torch.allclose(each, of_hosts.mean().expand(3)) for each in found)


def test_a_training_that_is_saved_goes_on_as_if_it_was_not():
    strategy = DiLoCo(3, quorum=2, grace_s=0.5, learners="host", outer_optimizer=torch.optim.Adam)

    def train(saved_at: int) -> list[dict[str, Tensor]]:
        params, rows = PROGRAM.start(), []
        optimizer = wrapped(params, strategy)
        for step in range(11):
            if step == saved_at:
                saved = copy.deepcopy((dict(params), optimizer.state_dict()))
                params, optimizer = saved[0], wrapped(saved[0], strategy)
                optimizer.load_state_dict(saved[1])
            one_step(PROGRAM, params, optimizer, step)
            version = torch.tensor(optimizer.synchronizer.state.version)
            rows.append({**{name: param.detach().clone() for name, param in params.items()}, "": version})
        return rows

    expected = run_ranks(4, lambda: train(-1), ranks_per_host=(2, 2))
    for saved_at in (5, 6):
        assert_same(expected, run_ranks(4, lambda at=saved_at: train(at), ranks_per_host=(2, 2)))


def test_the_consensus_is_that_of_the_outer_parameters_on_all_ranks():
    def train() -> tuple[int, list[Tensor]]:
        params = PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(2, quorum="all", learners="host"))
        for step in range(3):
            one_step(PROGRAM, params, optimizer, step)
            if step == 1:
                outer = [param.detach().clone() for param in params.values()]
        with optimizer.consensus():
            assert all(map(torch.equal, outer, params.values()))
        return 1, outer

    run_ranks(4, train, ranks_per_host=(2, 2))


# -- lost ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [(3,), (2,), (1,), (3, 4), (1, 5)], ids=repr)
def test_the_loss_of_a_rank_ends_its_learner_and_is_no_event_for_the_others(victims):
    """Also that of a rank of the first learner, whose first rank serves the others to the end."""
    ended = {rank // 2 for rank in victims}
    for seed in range(3):
        gone: dict[int, Recorded] = {}

        def note_and_die(step: int, so_far: Recorded, gone: dict[int, Recorded] = gone) -> None:
            gone[mpisgd.rank()] = copy.deepcopy(so_far)
            if mpisgd.rank() in victims and step == 5:
                lose_ranks(mpisgd.rank())

        def train(seed: int = seed, before: Any = note_and_die) -> Recorded:
            done = record(PROGRAM, LATE, seed, before_step=before)
            scheduling.sleep(0.2)  # all have noticed the losses
            return done

        found: list[Any] = run_ranks(6, train, seed=seed, losses=[], ranks_per_host=HOSTS)
        for rank, one in enumerate(found):
            if rank in victims:
                assert one is LOST
            elif rank // 2 in ended:
                assert isinstance(one, LearnerLost), one
                lost = next(each for each in victims if each // 2 == rank // 2)
                mine = f"ranks {rank // 2 * 2}, {rank // 2 * 2 + 1} of the job are one learner"
                assert f"{mine}, and rank {lost} of the job was lost" in str(one)
            else:
                assert isinstance(one, Recorded), one
        left = [one for one in found if isinstance(one, Recorded)]
        for one in left[1:]:
            assert all(torch.equal(one.params[name], left[0].params[name]) for name in one.params)
        if 0 not in ended:  # whose first rank has the log of the outer parameters
            both = [gone[2 * learner] if learner in ended else found[2 * learner] for learner in range(3)]
            assert_replayed(JOINED, LATE, both, close=CLOSE)


def waits(victim: int | None, at: int, learners: str = "host") -> list[list[float]]:
    """Return how long each step has taken on each rank that is left, where one is lost before a step."""

    def train() -> list[float]:
        took, params = [], PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(2, quorum=2, grace_s=5.0, learners=learners))
        for step in range(12):
            scheduling.sleep(0.2)
            if (mpisgd.rank(), step) == (victim, at):
                lose_ranks(mpisgd.rank())
            began_s = scheduling.now_s()
            one_step(PROGRAM, params, optimizer, step)
            took.append(scheduling.now_s() - began_s)
        optimizer.synchronizer.finish()
        scheduling.sleep(0.5)
        return took

    found: list[Any] = run_ranks(6, train, losses=[], ranks_per_host=HOSTS, seed=2)
    return [one for one in found if isinstance(one, list)]


@pytest.mark.parametrize("victim", [2, 3])
@pytest.mark.parametrize("at", [4, 5])
def test_nobody_waits_for_a_learner_that_has_lost_a_rank(victim, at):
    """The one that is left tells the others at once, and where it was the other one, MPI does."""
    took = waits(victim, at)
    assert len(took) == 4
    assert max(max(each[1:]) for each in took) < 0.3


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quorum": None}, "learners='host' goes with quorum="),
        ({"learners": "node"}, "learners='node'; expected one of"),
        ({"learners": 0}, "learners=0; expected one of"),
        ({"learners": True}, "learners=True; expected one of"),
        ({"learners": 2.0}, "learners=2.0; expected one of"),
    ],
)
def test_what_does_not_go_is_refused(options, text):
    with pytest.raises(InvalidArgument, match=text):
        DiLoCo(2, **{"quorum": 2, "learners": "host", **options})


def assert_refused(program: Any, text: str, hosts: Sequence[int] = (2, 2)) -> None:
    """Fail unless every rank has raised this."""

    def train() -> str:
        with pytest.raises(InvalidArgument) as caught:
            program(PROGRAM.start())
        return str(caught.value)

    found = run_ranks(sum(hosts), train, ranks_per_host=hosts)
    assert all(text in told for told in found), found


def test_more_learners_than_there_are_are_refused():
    assert_refused(
        lambda params: wrapped(params, DiLoCo(2, quorum=3, learners="host")),
        "quorum=3, and there are 2 learners: each host is one",
    )
    assert_refused(
        lambda params: wrapped(params, DiLoCo(2, quorum=3, learners=2)),
        "quorum=3, and there are 2 learners: 2 ranks are one",
    )


def test_ranks_of_a_host_that_cannot_be_divided_are_refused():
    assert_refused(
        lambda params: wrapped(params, DiLoCo(2, quorum=1, learners=2)),
        "has 3 ranks, which is no multiple of that",
        hosts=(2, 3),
    )


def test_parameters_elsewhere_are_refused():
    def check(params: dict[str, nn.Parameter]) -> None:
        there: Any = SimpleNamespace(group=wrapped(params, DiLoCo(1)).synchronizer.training.group)
        there.params = [torch.zeros(2, device="meta")]
        DiLoCo(2, quorum=1).check_ranks(there)
        DiLoCo(2, quorum=1, learners="host").check_ranks(there)

    assert_refused(check, "learners='host' is for parameters on the CPU")


def test_examples_are_counted_by_all_ranks_of_a_learner_or_by_none():
    def count(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(2, quorum="all", learners="host"))
        PROGRAM.loss(params, 0, PROGRAM.terms(0, 0)[0]).backward()
        if mpisgd.rank() % 2:
            optimizer.synchronizer.next_batch(examples=3)
        optimizer.step()

    assert_refused(count, "was called on 1 of the 2 ranks of a learner")


def test_what_the_first_rank_of_a_learner_raises_all_its_ranks_raise():
    """Learners count in one of two hosts alone, which the first rank of each is told of."""

    def count(params: dict[str, nn.Parameter]) -> None:
        optimizer = wrapped(params, DiLoCo(1, quorum="all", learners="host"))
        PROGRAM.loss(params, 0, PROGRAM.terms(0, 0)[0]).backward()
        if mpisgd.rank() < 2:
            optimizer.synchronizer.next_batch(examples=3)
        optimizer.step()

    assert_refused(count, "and others have not")


def test_the_wait_of_the_first_rank_is_told_to_the_others_of_its_learner():
    """A learner that does not come: the first rank of the other one is tired of waiting."""

    told: dict[int, str] = {}

    def train() -> None:
        params = PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(1, quorum="all", learners="host"))
        one_step(PROGRAM, params, optimizer, 0)
        if mpisgd.rank() >= 2:
            scheduling.sleep(100.0)
            return
        try:
            one_step(PROGRAM, params, optimizer, 1)
        except CollectiveTimeout as exc:
            told[mpisgd.rank()] = str(exc)
            scheduling.sleep(1.0)  # until the other rank has raised, too
            raise

    with pytest.raises(RankFailed):
        run_ranks(4, train, ranks_per_host=(2, 2), timeout_s=10.0)
    assert told[0] == told[1]
    assert "waited 10.0 s for a quorum of the learners" in told[0]


def test_the_wait_of_a_learner_that_loses_a_rank_meanwhile_ends_at_once():
    waited_s: dict[int, float] = {}

    def train() -> None:
        params = PROGRAM.start()
        optimizer = wrapped(params, DiLoCo(1, quorum="all", learners="host"))
        one_step(PROGRAM, params, optimizer, 0)
        if mpisgd.rank() < 2:
            scheduling.sleep(2.0)
            if mpisgd.rank() == 0:
                lose_ranks(3)
            scheduling.sleep(20.0)
        began_s = scheduling.now_s()
        try:
            one_step(PROGRAM, params, optimizer, 1)
        finally:
            waited_s[mpisgd.rank()] = scheduling.now_s() - began_s

    found = run_ranks(4, train, ranks_per_host=(2, 2), losses=[])
    assert isinstance(found[2], LearnerLost)
    assert 1.9 < waited_s[2] < 2.5


def test_learners_are_the_ranks_of_a_host_or_parts_of_them():
    topology = Topology(0, ((0, 1), (2, 3, 4, 5)), ("a", "b"))
    assert learners_of(topology, "rank") == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert learners_of(topology, "host") == [(0, 1), (2, 3, 4, 5)]
    assert learners_of(topology, 2) == [(0, 1), (2, 3), (4, 5)]
