"""Schedules as data: nothing lost or twice, no rank waits for ever, bubbles and versions as in the papers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from mpisgd.errors import InvalidArgument
from mpisgd.pipeline import Costs, GPipe, Interleaved, Kind, OneForwardOneBackward, PipeDream, PipeDream2BW
from mpisgd.pipeline.schedules.action import Action
from mpisgd.pipeline.schedules.shape import PipelineShape, in_turn
from mpisgd.pipeline.schedules.simulation import simulate

FLUSHING = [GPipe(), OneForwardOneBackward(), Interleaved()]
STASHING = [PipeDream(), PipeDream(vertical_sync=True), PipeDream2BW()]
SIZES = [(4, 4, 4), (4, 2, 8), (4, 1, 4), (6, 3, 12), (3, 3, 5), (5, 3, 6), (1, 1, 3)]
REPLICAS = [(2, 1), (1, 2), (2, 2), (3, 2, 1), (1, 3, 2)]


def plans(num_steps=2):
    for schedule in [*FLUSHING, *STASHING]:
        for stages, ranks, micro_batches in SIZES:
            if not isinstance(schedule, Interleaved) or not (stages % ranks or micro_batches % ranks):
                yield schedule.plan(stages, micro_batches, num_ranks=ranks, num_steps=num_steps)
        if not isinstance(schedule, Interleaved) and schedule != PipeDream(vertical_sync=True):
            for replicas in REPLICAS:
                yield schedule.plan(len(replicas), 12, replicas=replicas, num_steps=num_steps)


def test_every_micro_batch_has_one_forward_and_then_one_backward_on_every_stage():
    for plan in plans():
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            done = Counter(
                (action.stage, action.micro_batch)
                for own in plan.actions
                for action in own
                if action.kind is kind
            )
            numbers = range(2 * plan.shape.num_micro_batches)
            assert done == Counter((s, b) for s in range(plan.shape.num_stages) for b in numbers)
        spans = {span.action[:3]: span for own in plan.timeline().spans for span in own}
        for (kind, stage, number), span in spans.items():
            if kind is Kind.BACKWARD:
                assert spans[Kind.FORWARD, stage, number].end <= span.begin


def test_every_message_is_sent_once_and_received_once_by_its_ranks():
    pairs = [(Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION), (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)]
    for plan in plans():
        for sends, receives in pairs:
            sent, received = Counter(), Counter()
            for rank, own in enumerate(plan.actions):
                for action in own:
                    other = plan.shape.rank_of(action.peer, action.micro_batch)
                    if action.kind is sends:
                        sent[action.stage, action.peer, action.micro_batch, rank, other] += 1
                    elif action.kind is receives:
                        received[action.peer, action.stage, action.micro_batch, other, rank] += 1
            assert sent == received
            assert set(sent.values()) <= {1}


def test_a_rank_computes_one_thing_at_a_time_with_all_that_it_needs():
    for plan in plans():
        ends = {}
        for own in plan.timeline().spans:
            for before, after in itertools.pairwise(own):
                assert before.end <= after.begin
            ends |= {span.action[:3]: span.end for span in own}
        for own in plan.timeline().spans:
            for span in own:
                stage, number = span.action[1:3]
                if span.action.kind is Kind.FORWARD and stage > 0:
                    assert ends[Kind.FORWARD, stage - 1, number] <= span.begin
                if span.action.kind is Kind.BACKWARD and stage < plan.shape.num_stages - 1:
                    assert ends[Kind.BACKWARD, stage + 1, number] <= span.begin


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("backward", [1, 2])
def test_the_bubble_is_that_of_the_papers(p, backward):
    costs = Costs(backward=backward)
    for m in [p, 2 * p, 3 * p]:
        share = (p - 1) / (m + p - 1)
        assert GPipe().plan(p, m).bubble_share(costs) == pytest.approx(share, abs=1e-12)
        assert OneForwardOneBackward().plan(p, m).bubble_share(costs) == pytest.approx(share, abs=1e-12)
        for v in [1, 2, 3]:
            plan = Interleaved().plan(p * v, m, num_ranks=p)
            # Idle over useful time is that of 1F1B, divided by v.
            found = plan.bubble_share(costs) / (1 - plan.bubble_share(costs))
            assert found == pytest.approx((p - 1) / m / v, abs=1e-12)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_activations_and_versions_are_held_as_the_papers_say(p):
    m = 2 * p
    for plan, activations, versions in [
        (GPipe().plan(p, m, num_steps=3), [m] * p, [1] * p),
        (OneForwardOneBackward().plan(p, m, num_steps=3), [p - s for s in range(p)], [1] * p),
        (PipeDream().plan(p, m, num_steps=3), [p - s for s in range(p)], [p - s for s in range(p)]),
        (PipeDream(vertical_sync=True).plan(p, m, num_steps=3), [p - s for s in range(p)], [p] * p),
        (PipeDream2BW().plan(p, m, num_steps=3), [p - s for s in range(p)], [2] * p),
    ]:
        assert [plan.activations_held(stage) for stage in range(p)] == activations
        assert [plan.versions_held(stage) for stage in range(p)] == versions, plan.name


def test_a_backward_reads_the_version_of_its_forward_and_only_versions_that_are_kept():
    for plan in plans(3):
        read = {}
        for rank, own in enumerate(plan.actions):
            held = {stage: {0} for stage in plan.shape.stages_of(rank)}
            for action in own:
                if action.kind is Kind.UPDATE:
                    assert action.version == max(held[action.stage]) + 1
                    kept = {*held[action.stage], action.version}
                    held[action.stage] = {version for version in kept if version >= action.keep_from}
                elif action.kind.is_compute:
                    assert action.version in held[action.stage]
                    key = action.stage, action.micro_batch
                    assert read.setdefault(key, action.version) == action.version


def versions_read(plan, stage):
    return [
        action.version
        for own in plan.actions
        for action in own
        if action.kind is Kind.FORWARD and action.stage == stage
    ]


def test_pipedream_reads_the_versions_of_its_update_rule():
    """w(t-n+1+s) on stage s for micro-batch t; with vertical sync w(t-n+1) on all."""
    n, m = 4, 10
    for stage in range(n):
        stashed = [max(0, t - n + 1 + stage) for t in range(m)]
        assert versions_read(PipeDream().plan(n, m), stage) == stashed
        synced = [max(0, t - n + 1) for t in range(m)]
        assert versions_read(PipeDream(vertical_sync=True).plan(n, m), stage) == synced


def test_2bw_reads_one_version_per_step_and_the_one_before_the_newest():
    for stage in range(3):
        plan = PipeDream2BW().plan(3, 4, num_steps=4)
        assert versions_read(plan, stage) == [0] * 8 + [1] * 4 + [2] * 4


def test_steps_of_stashing_schedules_follow_each_other_without_a_gap():
    """The bubble is that of one fill, however many steps."""
    p, m = 4, 8
    for schedule in STASHING:
        one, ten = (schedule.plan(p, m, num_steps=steps) for steps in (1, 10))
        assert ten.bubble_share() == pytest.approx((p - 1) / (10 * m + p - 1), abs=1e-12)
        # What a rank does in a step does not depend on how many follow.
        for rank in range(p):
            first = schedule.actions(one.shape, rank, 0)
            assert list(ten.actions[rank][: len(first)]) == first


def test_replicas_take_micro_batches_in_turn_and_reduce_together():
    plan = PipeDream().plan(2, 6, replicas=(2, 1))
    for rank in (0, 1):
        own = [a.micro_batch for a in plan.actions[rank] if a.kind is Kind.FORWARD]
        assert own == [rank, rank + 2, rank + 4]
        reductions = [a.version for a in plan.actions[rank] if a.kind is Kind.REDUCE]
        assert reductions == [1, 2, 3]
    assert not [a for a in plan.actions[2] if a.kind is Kind.REDUCE]


def test_an_order_that_never_ends_is_named():
    shape = PipelineShape(((0,), (1,)), 1)
    forward, backward = (Action(kind, 0, 0) for kind in (Kind.FORWARD, Kind.BACKWARD))
    later = [Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)]
    simulate([[forward, backward], later], shape)
    with pytest.raises(InvalidArgument, match=r"rank 0 at B0\.0v0, rank 1 at F1\.0v0"):
        simulate([[backward, forward], later], shape)


def test_a_plan_prints_as_a_table():
    text = str(OneForwardOneBackward().plan(3, 3))
    assert text == (
        "OneForwardOneBackward: 3 stages on 3 ranks, 3 micro-batches, bubble 40.0 %\n"
        "by stage: versions of weights held 1 1 1, activations held 3 2 1\n\n"
        "time    0  1  2  3  4  5  6  7  8  9\n"
        "rank 0 F0 F1 F2  .  . B0  . B1  . B2\n"
        "rank 1  . F0 F1  . B0 F2 B1  . B2  .\n"
        "rank 2  .  . F0 B0 F1 B1 F2 B2  .  ."
    )
    assert "F3v1" in PipeDream().plan(3, 4).table(versions=True)
    assert "F2.1" in Interleaved().plan(4, 2, num_ranks=2).table()


def test_a_plan_draws_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plan = PipeDream().plan(4, 8)
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GPipe().plan(2, 4, num_ranks=3), "2 stages on 3 ranks"),
        (lambda: GPipe().plan(2, 0), "num_micro_batches=0"),
        (lambda: GPipe().plan(2, 4, replicas=(1, 0)), "replicas=0"),
        (lambda: GPipe().plan(2, 4, replicas=(1,)), "for 2 stages"),
        (lambda: Interleaved().plan(4, 3, num_ranks=2), "multiple of the 2 ranks"),
        (lambda: Interleaved().plan(5, 4, num_ranks=2), "5 stages on 2 ranks"),
        (lambda: Interleaved().plan(2, 4, replicas=(2, 2)), "no replicas"),
        (lambda: PipeDream().plan(2, 3, replicas=(2, 1)), "2 replicas, expected a multiple"),
        (lambda: PipeDream(vertical_sync=True).plan(2, 4, replicas=(2, 1)), "vertical_sync"),
        (lambda: PipeDream(vertical_sync="yes"), "vertical_sync='yes'"),
        (lambda: PipeDream2BW().plan(4, 3), "4 or more"),
        (lambda: PipeDream().plan_of(PipelineShape(in_turn(2, 2), 2, ties=((0, 1),))), "tied"),
        (lambda: PipelineShape(in_turn(2, 2), 2, skips=((1, 0),)), "from stage 1 to stage 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, text):
    with pytest.raises(InvalidArgument, match=text):
        make()


def test_schedules_print_and_compare():
    assert repr(PipeDream(vertical_sync=True)) == "PipeDream(vertical_sync=True)"
    assert PipeDream() == PipeDream() != PipeDream(vertical_sync=True)
