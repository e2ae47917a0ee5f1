"""Some random programs, and mutations of mpisgd that random programs must find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fuzzing.draw import draw
from verdicts import everyone, referee

import mpisgd
from mpisgd.gradients import fusion_buffer, reducer
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.gradients.fusion_buffer import FusionBuffer
from mpisgd.methods.local_sgd.local_sgd import LocalSGD
from mpisgd.methods.sharded import synchronizer as sharded_synchronizer
from mpisgd.methods.strategy.state_keeper import StateKeeper
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.python_text import python_text
from mpisgd.tools.verification.programs.try_out import try_out
from mpisgd.transport import torch_reduction

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, and what mpisgd says of refused choices

NUM_PROGRAMS = 30
FIRST_SEED = 1_000
ENOUGH = 400  # programs, to find a mutation


def run(seed: int) -> Verdict:
    """Run the program of a seed on the ranks of this job."""
    program = draw(seed, mpisgd.size(), 0)
    verdict = try_out(program, mpisgd.rank(), referee().allgather)
    waits = "CollectiveTimeout" in verdict.text
    everyone(not waits, f"seed {seed}: {verdict.kind}: {verdict.text}\n{python_text(program)}")
    return verdict


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_PROGRAMS, 10))
def test_random_programs_equal_one_process(first):
    for seed in range(first, first + 10):
        verdict = run(seed)
        everyone(not verdict.is_fault, f"seed {seed}: {verdict.kind}: {verdict.text}")


# -- mutations -------------------------------------------------------------------------------------------


class Mutation(NamedTuple):
    """A fault of mpisgd: the place, the name, and what is made of what is there."""

    owner: Any
    name: str
    wrong: Callable[[Any], Any]


def _divides_by_one_less(divide):
    return lambda total, size: divide(total, max(1, size - 1))


def _drops_a_rank(load):
    def loads(self, *arguments):
        kinds = load(self, *arguments)
        if mpisgd.rank() == mpisgd.size() - 1:
            self.flat.zero_()
        return kinds

    return loads


def _keeps_stale_gradients(unload):
    return lambda self, params, exists: unload(self, params, [True] * len(params))


def _loses_momentum(state_dict):
    def without(self):
        whole = state_dict(self)
        lost = ("momentum_buffer", "exp_avg")
        states = whole["state"].items()
        kept = {p: {k: v for k, v in entries.items() if k not in lost} for p, entries in states}
        return {**whole, "state": kept}

    return without


def _clips_by_its_own_norm(_):
    def clip(grads, owners, group, max_norm, norm_type, error_if_nonfinite):
        params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    return clip


def _lies_one_too_early(window):
    return lambda flat, offset, layout: window(flat, max(0, offset - 1), layout)


def _leaves_sparse_gradients(_):
    return lambda params, grads, op, group: [
        torch.zeros_like(param) if grad is None else grad for param, grad in zip(params, grads, strict=True)
    ]


MUTATIONS = {
    "the mean divides by one rank less": Mutation(torch_reduction, "divide", _divides_by_one_less),
    "the last rank's gradients are dropped": Mutation(FusionBuffer, "load", _drops_a_rank),
    "what nobody used keeps a stale gradient": Mutation(FusionBuffer, "unload", _keeps_stale_gradients),
    "momentum is not in the state": Mutation(DistributedOptimizer, "state_dict", _loses_momentum),
    "a rank clips by its own norm": Mutation(sharded_synchronizer, "clip_grad_norm_", _clips_by_its_own_norm),
    "a gradient lies one element too early": Mutation(fusion_buffer, "window", _lies_one_too_early),
    "no_sync sends": Mutation(AccumulationWindow, "muted", lambda _: lambda self: contextlib.nullcontext()),
    "sparse gradients stay on their rank": Mutation(reducer, "reduce_sparse", _leaves_sparse_gradients),
    "local steps are averaged a step late": Mutation(
        LocalSGD, "period", lambda period: property(lambda self: period.fget(self) + 1)
    ),
    "residuals are not saved": Mutation(StateKeeper, "entry", lambda _: lambda self: {}),
}
QUICK = tuple(MUTATIONS)[:2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MUTATIONS]
)
def test_a_mutation_is_found(monkeypatch, name):
    mutation = MUTATIONS[name]
    right = getattr(mutation.owner, mutation.name)
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.wrong(right))
    for seed in range(ENOUGH):
        if run(seed).is_fault:
            print(f"found by seed {seed}")
            return
    pytest.fail(f"{ENOUGH} programs do not find it")
