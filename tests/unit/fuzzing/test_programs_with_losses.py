"""Programs in which ranks are lost: some of them, what they must find, and what they have found."""

from __future__ import annotations

import pytest
from fuzzing.draw import draw
from fuzzing.draw_losses import with_losses
from fuzzing.shrink import shrink

from mpisgd.elastic import state_handlers
from mpisgd.elastic.buddy_replicas import BuddyReplicas
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.tools.verification.programs.contract import violation
from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Broadcast,
    Commit,
    Lose,
    Reload,
    SetFrozen,
    Step,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.lost_ranks import Resumption, without_losses
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program, parse
from mpisgd.tools.verification.programs.python_text import python_text
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

FIRST_SEED, NUM_PROGRAMS = 1_200, 10


def program(*events, ranks=3, per_host=0, group="world", optimizer="SGD", settings=(("lr", 0.5),), **options):
    """A program with one layer."""
    made = Optimizer(optimizer, settings, (0,), tuple(options.items()))
    return Program(0, ranks, per_host, optimizer == "SGD", (Layer(),), (made,), events, group)


def run(each: Program) -> str:
    """Run a program and return what became of it."""
    verdict = ThreadsBackend().run(each)
    return f"{verdict.kind}: {verdict.text}".removesuffix(": ")


STEP = (ZeroGrad(), Backward((1,)), Step())
WITH_MOMENTUM = program(
    *(*STEP, Commit(), *STEP, Commit(), Backward((3,)), Step(), Lose((1,)), Backward((4,)), Step()),
    settings=(("lr", 0.5), ("momentum", 0.5)),
)


def test_random_programs_with_losses_equal_one_process():
    backend = ThreadsBackend()
    drawn = [with_losses(draw(seed)) for seed in range(FIRST_SEED, FIRST_SEED + NUM_PROGRAMS)]
    assert sum(each.loses for each in drawn) > NUM_PROGRAMS // 2
    for each in drawn:
        if each.loses:
            verdict = backend.run(each)
            assert not verdict.is_fault, f"{verdict.kind}: {verdict.text}\n{python_text(each)}"


def test_programs_with_losses_are_drawn_alike_read_back_and_printed():
    drawn = [with_losses(draw(seed)) for seed in range(60)]
    assert drawn == [with_losses(draw(seed)) for seed in range(60)]
    for each in drawn:
        assert parse(repr(each)) == each
        assert not violation(each)
        compile(python_text(each), "program", "exec")


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([Lose((0, 1, 2))], "nobody is left"),
        ([Lose((3,))], "no such rank"),
        ([Lose(())], "of nobody"),
        ([Backward((1,)), Lose((2,)), Backward((2,), skipped=(0, 1))], "nobody that is left"),
        ([Broadcast(), Lose((0,))], "who sends"),
        ([Reload(), Commit(), Lose((0,))], "two commits"),
        ([Lose((0,), 7), Reload()], "may be lost in it"),
        ([Lose((0,)), Reload(), Commit()], "may be lost in it"),
        ([AddGroup(0), Commit(), Commit(), Lose((0,))], "has this layer"),
    ],
)
def test_what_a_program_with_losses_must_not_do_is_named(events, rule):
    assert rule in violation(program(*events))


def test_what_comes_after_a_commit_is_done_again_by_those_that_are_left():
    events = (Backward((1,)), Commit(), Step(), Lose((2,)), Backward((2,)))
    plain = without_losses(program(*events), [Resumption(2, (0, 1))])
    assert plain.events == (Backward((1,)), Reload(), Step(), Backward((2,)))


def test_shrinking_keeps_the_loss_that_it_needs():
    big = program(*STEP, Commit(), *STEP, Lose((0, 2), 40), *STEP, ranks=4)

    def kind(each: Program) -> str:
        late = [event for event in each.events if isinstance(event, Lose) and event.waits >= 3]
        return "values" if late else "ok"

    small = shrink(big, "values", kind, max_runs=500)
    assert small.ranks == 2
    (event,) = small.events
    assert (len(event.ranks), event.waits) == (1, 3)


# DiLoCo waited for a mean that was on its way when a rank was lost, in every world that followed: each
# recovery led to the next one.


@pytest.mark.parametrize("waits", [1, 3, 5, 8])
def test_what_was_on_its_way_when_a_rank_was_lost_is_not_waited_for(waits):
    strategy = "mpisgd.DiLoCo(sync_every=3, overlap_steps=1)"
    events = (*(STEP * 2), Commit(), *STEP, Lose((2,), waits), *(STEP * 3))
    assert run(program(*events, optimizer="AdamW", settings=(("lr", 0.01),), strategy=strategy)) == "ok"


@pytest.mark.parametrize("lost", [(1,), (0, 2)])
@pytest.mark.parametrize("stage", [1, 2])
def test_those_that_are_left_get_their_parts_of_a_divided_state(stage, lost):
    events = (*STEP, Commit(), *STEP, Commit(), *STEP, Lose(lost), *(STEP * 2))
    strategy = f"mpisgd.Sharded(stage={stage})"
    assert (
        run(program(*events, ranks=4, optimizer="AdamW", settings=(("lr", 0.01),), strategy=strategy)) == "ok"
    )


# -- what cannot be recovered from is refused on all that are left ----------------------------------------


def test_a_part_of_the_state_that_is_lost_with_its_replica_is_told_to_all():
    lost = program(*STEP, Lose((1, 2)), strategy="mpisgd.Sharded()")
    assert run(lost).startswith("refused: Failure(event=-1, kind='StateLost'")
    assert run(program(*STEP, Lose((1, 2)))) == "ok"


def test_the_smaller_part_ends():
    assert run(program(*STEP, Lose((0, 1)), per_host=1)).startswith(
        "refused: Failure(event=-1, kind='JobError'"
    )
    assert run(program(*STEP, Lose((0,)), per_host=1)) == "ok"


def test_a_recovery_that_should_be_refused_is_found(monkeypatch):
    monkeypatch.setattr(BuddyReplicas, "restore", lambda self, number, values: None)
    assert run(program(*STEP, Lose((1, 2)), strategy="mpisgd.Sharded()")).startswith("not refused")


# -- faults that they must find ----------------------------------------------------------------------------


def restore_no_parameters(monkeypatch):
    monkeypatch.setattr(state_handlers._ModuleHandler, "restore", lambda self, saved: None)


def restore_no_state(monkeypatch):
    monkeypatch.setattr(state_handlers._OptimizerHandler, "restore", lambda self, saved: None)


def keep_gradients(monkeypatch):
    move = DistributedOptimizer.rebuild

    def rebuild(self, group=None):
        grads = {param: param.grad for each in self.param_groups for param in each["params"]}
        move(self, group)
        for param, grad in grads.items():
            param.grad = grad

    monkeypatch.setattr(DistributedOptimizer, "rebuild", rebuild)


@pytest.mark.parametrize("mutation", [restore_no_parameters, restore_no_state, keep_gradients])
def test_a_fault_of_the_recovery_is_found(monkeypatch, mutation):
    mutation(monkeypatch)
    assert run(WITH_MOMENTUM) != "ok"


def test_without_a_fault_none_is_found():
    assert run(WITH_MOMENTUM) == "ok"


# -- what they have found ------------------------------------------------------------------------------------

# Seed 15. A rank was lost while the others were in a step, in which an optimizer does not see its parameters:
# the state of the commit could not be loaded.


@pytest.mark.parametrize(
    "option", [("share_parameters", "True"), ("strategy", "mpisgd.Sharded()")], ids=lambda option: option[0]
)
def test_a_loss_in_the_middle_of_a_step_that_hides_parameters(option):
    for waits in range(2, 40, 6):
        each = program(Lose((0,), waits), Commit(), Step(), Commit(), Step(), ranks=2, **dict([option]))
        assert run(each) == "ok", waits


# Seeds 4 and 98. 1-bit optimizers kept the gradients of what was going on when a rank was lost.


def test_1_bit_optimizers_drop_gradients_where_the_ranks_change():
    settings = (("lr", 0.01), ("freeze_step", 100))
    each = program(Backward((3,)), Step(), Lose((0,)), ranks=2, optimizer="OneBitAdam", settings=settings)
    assert run(each) == "ok"


# Seeds 172 and 1008. Torch casts what it loads to the dtype of the parameter, such as a product that NAdam
# computes in float32, which went on in another precision then.


@pytest.mark.parametrize("options", [{}, {"strategy": "mpisgd.Sharded()"}], ids=str)
def test_a_restored_state_has_the_dtypes_of_the_commit(options):
    events = (*STEP, Commit(), *STEP, Lose((1,)), *STEP)
    assert run(program(*events, optimizer="NAdam", settings=(("lr", 0.01),), **options)) == "ok"


# Seeds 138 and 166. A divided optimizer with a group of its own took the state of the commit before the reset
# callback had given it a new group, and refused that group then.


@pytest.mark.parametrize("group", ["duplicate", "reversed"])
def test_a_divided_optimizer_with_a_group_of_its_own_is_rebuilt_by_a_callback(group):
    settings = (("lr", 0.5), ("momentum", 0.5))
    events = (*STEP, Commit(), *STEP, Lose((1,)), *STEP)
    assert run(program(*events, group=group, settings=settings, strategy="mpisgd.Sharded()")) == "ok"


# Seed 73007348. A window relied on another one whose reductions were counted from 0 again, on ranks that had
# seen the end of its last one before the loss and on those that had not.


def test_two_optimizers_of_one_parameter_go_on_after_a_loss_in_their_reduction():
    sgd = Optimizer("SGD", (("lr", 0.25),), (0,))
    events = (Backward((7,), skipped=(0,)), Lose((1,)), Step())
    each = Program(73007348, 3, 0, False, (Layer(shape=(1,)),), (sgd, sgd), events)
    assert run(each) in ("ok", "refused")


# Seed 211857. What is sent during backward has a plan from the start, which ranks could not agree on after a
# loss: some had frozen already what others had not.


@pytest.mark.parametrize("options", [{}, {"share_parameters": "True"}], ids=str)
def test_a_rank_is_lost_before_all_have_frozen_a_parameter(options):
    sgd = Optimizer(
        "SGD", (("lr", 0.25),), (0, 1), (("strategy", "mpisgd.Sharded(stage=2)"), *options.items())
    )
    events = (*STEP, Commit(), Lose((2,)), SetFrozen(1), *STEP)
    layers = (Layer(shape=(1,)), Layer(shape=(1,)))
    found = [run(Program(seed, 3, 1, True, layers, (sgd,), events)) for seed in range(211857, 211877)]
    assert set(found) == {"ok"}
