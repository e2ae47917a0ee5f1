"""What a method keeps, in every situation that a state can be in: for each method, by the same checks.

Before there was one mechanism, what was saved by one rank, loaded elsewhere, extended, moved to other ranks
or handed over at a recovery was different by method, and mostly silent.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import tempfile
import warnings

import pytest
import torch
from methods import (
    BY_THEMSELVES,
    METHODS,
    OWN_MODELS,
    SYNCHRONOUS,
    Net,
    Optimizer,
    marked,
    sgd,
    train,
    values,
)
from torch import Tensor
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import checkpoint

SAVED_AT, LAST = 5, 14  # between two means, and before a period grows


def folder() -> str:
    """An empty folder, which rank 0 has made."""
    return mpisgd.broadcast_object(tempfile.mkdtemp() if mpisgd.rank() == 0 else None)


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def through_a_file(state: object) -> object:
    """What torch.load gives back of it, without pickled code."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def without_learning(optimizer: Optimizer) -> None:
    for options in optimizer.param_groups:
        options["lr"] = 0.0


def num_settling(name: str, num: int) -> int:
    """How many steps without learning say where it ends: `num` where ranks come together slowly, or drift."""
    slow = name.startswith(("CHOCO", "DiLoCo", "ElasticAveraging")) or "MPISGD_TEST_LONG" in os.environ
    return num if slow else 25


def spread(model: torch.nn.Module) -> float:
    """How far the ranks' parameters are from each other."""
    found: list[list[Tensor]] = [[]] * mpisgd.size()
    mpisgd.all_gather_object(found, values(model))
    return max(apart(theirs, found[0]) for theirs in found)


# --- resumed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked(METHODS))
def test_a_resumed_run_is_the_uninterrupted_one(name):
    model, by_rank, by_all = Net(), Net(seed=1), Net(seed=2)
    optimizer, from_own_file, from_checkpoint = (METHODS[name](net) for net in (model, by_rank, by_all))
    train(model, optimizer, 0, SAVED_AT)
    model_state, state = through_a_file([model.state_dict(), optimizer.state_dict()])
    by_rank.load_state_dict(model_state)
    from_own_file.load_state_dict(state)
    path = checkpoint.save(folder(), SAVED_AT, model=model, optimizer=optimizer)
    checkpoint.load(path, model=by_all, optimizer=from_checkpoint)
    train(model, optimizer, SAVED_AT, LAST)
    for again, resumed, how in (
        (by_rank, from_own_file, "each rank its own file"),
        (by_all, from_checkpoint, "a checkpoint"),
    ):
        train(again, resumed, SAVED_AT, LAST)
        off = apart(values(again), values(model))
        everyone(off == 0, f"{how}: {off}")


@pytest.mark.parametrize("name", ["TopK", "OneBit, two steps", "CHOCO", "OneBitAdam"])
def test_a_broadcast_before_the_first_step_does_not_keep_residuals_from_being_saved(name):
    # The rank that had sent the state counted as one that has lost its own: its residual was left out.
    model, again = Net(), Net(seed=1)
    optimizer, resumed = METHODS[name](model), METHODS[name](again)
    mpisgd.broadcast_optimizer_state(optimizer)
    train(model, optimizer, 0, SAVED_AT)
    again.load_state_dict(through_a_file(model.state_dict()))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, SAVED_AT, LAST)
    train(again, resumed, SAVED_AT, LAST)
    off = apart(values(again), values(model))
    everyone(off == 0, f"{off}")


@pytest.mark.mpi(min_size=2)
def test_a_mean_under_way_is_taken_over_by_other_fragments():
    # A fragment took its parameters' changes to be all there, or none: KeyError.
    model, again = Net(), Net()
    cut = mpisgd.DiLoCo(4, fragments=3, overlap_steps=3)
    optimizer = mpisgd.DistributedOptimizer(sgd(model.parameters()), strategy=cut)
    train(model, optimizer, 0, SAVED_AT)  # of which the first fragment's is under way
    resumed = mpisgd.DistributedOptimizer(sgd(again.parameters()), strategy=mpisgd.DiLoCo(3))
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(again, resumed, SAVED_AT, LAST)
    everyone(all(bool(param.isfinite().all()) for param in values(again)), "not finite")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", marked(METHODS))
def test_fewer_ranks_go_on_from_the_consensus(name):
    """CHOCO's copies are one rank's, and of one W: models drifted without bound (0.9 to 30.9)."""
    fewer = mpisgd.new_group(range(mpisgd.size() - 1))
    model = Net()
    optimizer = METHODS[name](model)
    train(model, optimizer, 0, SAVED_AT)
    path = checkpoint.save(folder(), SAVED_AT, model=model, optimizer=optimizer)
    expected = values(model)
    if name in OWN_MODELS:
        with optimizer.consensus():
            expected = values(model)
    elif name == "ZeroOneAdam":
        expected = [mean_of(param) for param in expected]
    off = drift = 0.0
    if fewer.rank >= 0:
        again = Net(seed=1)
        resumed = METHODS[name](again, group=fewer)
        checkpoint.load(path, model=again, optimizer=resumed, group=fewer)
        off = apart(values(again), expected)
        train(again, resumed, SAVED_AT, LAST, fewer)
        without_learning(resumed)
        train(again, resumed, LAST, LAST + num_settling(name, 100), fewer)
        if not name.startswith("DiLoCo"):  # whose outer momentum goes on
            drift = max(param.abs().max().item() for param in values(again))
    everyone(off < 1e-12, f"{off}")
    everyone(drift < 10, f"drifted to {drift}")


def mean_of(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    mpisgd.all_reduce(total, mpisgd.ReduceOp.AVG)
    return total


# --- told by one rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked(METHODS))
def test_a_broadcast_of_the_state_makes_all_ranks_one(name):
    model = Net()
    optimizer = METHODS[name](model)
    train(model, optimizer, 0, SAVED_AT)
    mpisgd.broadcast_parameters(model)
    mpisgd.broadcast_optimizer_state(optimizer)
    same_on_all_ranks([param.tolist() for param in values(model)])
    begun = values(model)
    without_learning(optimizer)
    train(model, optimizer, SAVED_AT, SAVED_AT + num_settling(name, 100))
    off = spread(model)
    everyone(off < 1e-9, f"the ranks are {off} apart")
    # Without gradients, too: towards or beyond outer parameters, say, from where the ranks were by then.
    moves_on = name.startswith(("DiLoCo", "SparseLoCo", "ElasticAveraging", "documented"))
    if name not in BY_THEMSELVES and not moves_on:
        off = apart(values(model), begun)
        everyone(off < 1e-9, f"drifted by {off}")


# --- added parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DiLoCo", "ElasticAveraging"])
def test_the_consensus_has_parameters_that_were_added_since_the_last_step(name):
    # DiLoCo raised KeyError; with ElasticAveraging each rank had its own of them.
    model = Net()
    optimizer = METHODS[name](model)
    train(model, optimizer, 0, SAVED_AT)
    added = torch.nn.Parameter(torch.full((3,), mpisgd.rank() + 1.0))
    optimizer.add_param_group({"params": [added]})
    with optimizer.consensus():
        same_on_all_ranks(added.tolist())
    everyone(bool((added == mpisgd.rank() + 1).all()), f"{added}")


@pytest.mark.parametrize("name", marked([*SYNCHRONOUS, *OWN_MODELS]))
def test_parameters_that_are_added_change_nothing_else_and_are_trained(name):
    """Lists of two lengths were zipped: LocalSGD with a compression and ElasticAveraging raised."""
    model, longer = Net(), Net()
    optimizer, extended = METHODS[name](model), METHODS[name](longer)
    train(model, optimizer, 0, SAVED_AT)
    train(longer, extended, 0, SAVED_AT)
    added = torch.nn.Parameter(torch.arange(7.0, dtype=torch.float64))
    extended.add_param_group({"params": [added]})
    longer.weights.append(added)
    train(model, optimizer, SAVED_AT, LAST)
    train(longer, extended, SAVED_AT, LAST)
    off = apart(values(longer)[:-1], values(model))
    # These choose, or cut, over whole buckets.
    everyone(off < 1e-12 or name in ("RandomK", "OneBit, two steps"), f"the others: {off}")
    everyone((added.detach() - torch.arange(7.0)).abs().max().item() > 1e-3, "it was not trained")
    without_learning(extended)
    train(longer, extended, LAST, LAST + num_settling(name, 90))
    off = spread(longer)
    everyone(off < 1e-3, f"the ranks are {off} apart")


# --- another method's ---------------------------------------------------------------------------------


@pytest.mark.processes  # whose warnings it catches
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "source",
    [
        *("TopK", "DiLoCo, TopK", "OneBitAdam"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("OneBit, two steps", "LocalSGD", "CHOCO")),
    ],
)
def test_a_state_of_another_method_is_left_out_with_one_warning(source):
    """One of another compression raised in the first backward."""
    model = Net()
    optimizer = METHODS[source](model)
    train(model, optimizer, 0, SAVED_AT)
    entry = optimizer.state_dict()["mpisgd"]
    problems = []
    for name, make in METHODS.items():
        if name == source and name in BY_THEMSELVES:
            continue  # its state would lack that of the parameters
        again = Net()
        target = make(again)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target.load_state_dict({**target.state_dict(), "mpisgd": entry})
        texts = [str(each.message) for each in caught]
        of_compressor = {"compression", "warm_up"} & {*entry["alike"], *(entry["own"] or ())}
        same = re.search(rf"\b{entry['compression']}\b", repr(getattr(target, "compression", "")))
        differs = target.method != entry["of"] or (not same and of_compressor)
        if len(texts) != bool(differs and mpisgd.rank() == 0):
            problems.append(f"{name}: {texts}")
        train(again, target, 0, 4)
    everyone(not problems, "; ".join(problems))


# --- other ranks in a running job ---------------------------------------------------------------------


# Those that stay keep it where another one joins, too: one of each kind says it where nobody does.
WHERE_NOBODY_JOINS = ("LocalSGD", "DiLoCo", "push-sum", "CHOCO", "TopK", "OneBitAdam")
RECOVERIES = [
    pytest.param(*case, marks=() if case[0] or case[1] in WHERE_NOBODY_JOINS else pytest.mark.long)
    for case in itertools.product([False, True], [*OWN_MODELS, "TopK", "OneBitAdam"])
]


@pytest.mark.parametrize(("joins", "name"), RECOVERIES)
def test_survivors_keep_what_is_their_own_and_a_joiner_gets_rank_0s(name, joins):
    """As `mpisgd.elastic` restores it after a loss; here nobody was lost, and the last rank may be new."""
    is_new = joins and mpisgd.rank() == mpisgd.size() - 1 > 0
    model = Net()
    optimizer = METHODS[name](model)
    train(model, optimizer, 0, SAVED_AT)
    told = mpisgd.broadcast_object(values(model))
    expected = told if is_new else values(model)
    state = mpisgd.elastic.State(model=model, optimizer=optimizer)
    state.commit()
    if is_new:
        state = mpisgd.elastic.State(model=model, optimizer=optimizer)
    else:
        state._began = True
    train(model, optimizer, SAVED_AT, SAVED_AT + 3)
    state.resume(joiners=joins and mpisgd.size() > 1)
    everyone(apart(values(model), expected) == 0, f"{apart(values(model), expected)}")
    train(model, optimizer, SAVED_AT, LAST)
    without_learning(optimizer)
    train(model, optimizer, LAST, LAST + num_settling(name, 90))
    off = spread(model)
    everyone(off < 1e-3, f"the ranks are {off} apart")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["LocalSGD", "ElasticAveraging", "CHOCO", "push-sum"])
def test_ranks_that_join_at_another_step_are_told(name):
    """A newcomer counted periods from another step, unnoticed: ranks took their means at other steps."""
    others = mpisgd.new_group(range(1, mpisgd.size()))
    model = Net()
    optimizer = METHODS[name](model, group=others) if others.rank >= 0 else None
    if optimizer is not None:
        train(model, optimizer, 0, SAVED_AT, others)
    alone = mpisgd.new_group([0])
    optimizer = METHODS[name](model, group=alone) if optimizer is None else optimizer
    optimizer.rebuild()
    with raises_everywhere(mpisgd.OutOfSync) as caught:
        train(model, optimizer, 0, 1)
    everyone(
        "number of steps is rank 0: 0" in caught.text and "broadcast_optimizer_state" in caught.text,
        caught.text,
    )
    mpisgd.broadcast_parameters(model, 1)
    mpisgd.broadcast_optimizer_state(optimizer, 1)
    train(model, optimizer, SAVED_AT, LAST)
    without_learning(optimizer)
    train(model, optimizer, LAST, LAST + num_settling(name, 60))
    off = spread(model)
    everyone(off < 1e-3, f"the ranks are {off} apart")


@pytest.mark.mpi(min_size=2)
def test_states_of_different_steps_are_told():
    model, again = Net(), Net()
    optimizer, resumed = METHODS["LocalSGD"](model), METHODS["LocalSGD"](again)
    train(model, optimizer, 0, 2)
    states = [optimizer.state_dict()]
    train(model, optimizer, 2, 3)
    states.append(optimizer.state_dict())
    resumed.load_state_dict(states[mpisgd.rank() % 2])
    with raises_everywhere(mpisgd.OutOfSync) as caught:
        train(again, resumed, 3, 4)
    everyone("number of steps" in caught.text and "load states of the same step" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_loaded_model_is_what_pairs_of_ranks_average():
    """AD-PSGD answered with the values of construction: a neighbour took the mean with stale ones."""
    strategy = mpisgd.Gossip("ring", style="asynchronous")
    param = torch.nn.Parameter(torch.full((3,), 100.0 * mpisgd.rank()))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0), strategy=strategy)
    for _ in range(3):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    state = optimizer.state_dict()
    with torch.no_grad():
        param.fill_(7.0)
    optimizer.load_state_dict(state)
    for _ in range(30):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    mpisgd.barrier()
    optimizer.rebuild()  # ends the exchanges
    everyone(bool((param == 7.0).all()), f"{param.tolist()}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["Gossip", "push-sum", "CHOCO"])
def test_parameters_that_are_trained_later_are_mixed_from_then_on(name):
    model = Net()
    with torch.no_grad():
        model.weights[1].add_(mpisgd.rank())
    model.weights[1].requires_grad_(False)
    optimizer = METHODS[name](model)
    train(model, optimizer, 0, SAVED_AT)
    everyone(spread(model) > 0.9, "it is not to be mixed before")
    model.weights[1].requires_grad_(True)
    train(model, optimizer, SAVED_AT, LAST)
    without_learning(optimizer)
    train(model, optimizer, LAST, LAST + num_settling(name, 90))
    off = spread(model)
    everyone(off < 1e-3, f"the ranks are {off} apart")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_state_of_a_parameter_that_some_ranks_have_not_used_is_averaged(kind):
    """The ranks reduced lists of different lengths. Where there is none it counts as zero."""
    first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = mpisgd.DistributedOptimizer(
        kind([first, second], lr=0.1, **options), strategy=mpisgd.LocalSGD(1, average_state=True)
    )
    names = ["momentum_buffer"] if kind is torch.optim.SGD else ["exp_avg", "exp_avg_sq"]
    for _ in range(2):
        first.grad = torch.ones(3)
        second.grad = torch.ones(3) if mpisgd.rank() == 0 else None
        optimizer.step()
        state = [optimizer.state[second][name] for name in names]
        same_on_all_ranks([tensor.tolist() for tensor in (first, second, *state)])
    everyone(bool((optimizer.state[second][names[0]] > 0).all()))


def test_a_state_of_a_later_version_is_refused_by_name():
    model = Net()
    mpisgd.broadcast_parameters(model)
    for name in ("OneBitAdam", "LocalSGD"):  # after the latter, ranks have models of their own
        optimizer = METHODS[name](model)
        train(model, optimizer, 0, 2)
        state = optimizer.state_dict()
        state["mpisgd"] = {**state["mpisgd"], "version": 99}
        with raises_everywhere(mpisgd.InvalidArgument) as caught:
            optimizer.load_state_dict(state)
        everyone("version 99" in caught.text, caught.text)
