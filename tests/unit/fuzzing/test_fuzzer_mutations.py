"""Mutations of mpisgd that random programs on threads must find; tests/mpi/fuzzing has others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from fuzzing.draw import draw

from mpisgd.gradients import compression_state
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.gradients.fusion_buffer import FusionBuffer
from mpisgd.gradients.in_place_gradient import InPlaceGradient
from mpisgd.methods.compressed_momentum.compressed_momentum import CompressedMomentumOptimizer
from mpisgd.methods.diloco import fragment
from mpisgd.methods.elastic_averaging import elastic_averaging
from mpisgd.methods.gossip import mixer
from mpisgd.methods.sharded import synchronizer as sharded_synchronizer
from mpisgd.methods.strategy.local_scaling import LocalScaling
from mpisgd.methods.strategy.state_keeper import StateKeeper
from mpisgd.methods.threshold import threshold
from mpisgd.optim import broadcast
from mpisgd.sharding import divided_parameters
from mpisgd.tools.verification.programs.events import Backward, Broadcast, Convert, Step
from mpisgd.tools.verification.programs.program import ONE_BIT, Program
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

ENOUGH = 12_000  # programs, of which those are run that do what it takes


class Mutation(NamedTuple):
    """A fault of mpisgd.

    Attributes:
        owner: where it is.
        name: what is changed there.
        wrong: what is made of what is there.
        needs: which programs can find it.
    """

    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    needs: Callable[[Program], bool]


def has(kind: type) -> Callable[[Program], bool]:
    """Return what tells whether a program has an event of a kind."""
    return lambda program: any(isinstance(event, kind) for event in program.events)


def uses(*words: str) -> Callable[[Program], bool]:
    """Return what tells whether an option of an optimizer has one of some words."""
    return lambda program: any(
        word in text for each in program.optimizers for _, text in each.options for word in words
    )


def overflows(program: Program) -> bool:
    """Return whether a loss is infinite on some rank, and not on all."""
    return program.ranks > 1 and any(isinstance(e, Backward) and e.overflow for e in program.events)


def has_closure(program: Program) -> bool:
    """Return whether a step has one."""
    return any(isinstance(event, Step) and event.closure for event in program.events)


def _gives_what_another_rank_had(take):
    def takes(self, entry):
        group = self._of.training.group
        take(self, {**entry, "rank": group.rank, "size": group.size})

    return takes


def _loses_pieces_of_one_element(divide):
    def divides(*arguments):
        found = divide(*arguments)
        return [[piece for piece in of_rank if piece.numel > 1] for of_rank in found]

    return divides


def _follows_nothing(_):
    return lambda kept, params, name: kept[0].mul_(1.001)


def _mixes_by_another_matrix(mix):
    return lambda tensors, graph, group, number, **how: mix(tensors, graph, group, number + 1, **how)


MUTATIONS = {
    "what is a rank's own survives another number of ranks": Mutation(
        StateKeeper, "_take", _gives_what_another_rank_had, lambda p: p.is_resized and uses("compress")(p)
    ),
    "an overflow of pieces is not told": Mutation(
        sharded_synchronizer, "all_reduce", lambda _: lambda *arguments: None, overflows
    ),
    "a rank takes the step of which its gradients are infinite": Mutation(
        LocalScaling, "_hide", lambda _: lambda self, params: None, overflows
    ),
    "what a closure computes stays on its rank": Mutation(
        AccumulationWindow, "around", lambda _: lambda self, closure: closure, has_closure
    ),
    "1-bit optimizers average no gradients": Mutation(
        CompressedMomentumOptimizer,
        "_average_gradients",
        lambda _: lambda self: None,
        lambda p: p.optimizers[0].name in ONE_BIT,
    ),
    "the source of a broadcast keeps what is its own": Mutation(
        StateKeeper, "forget_own", lambda _: lambda self: None, has(Broadcast)
    ),
    "gradients lie as parameters did before": Mutation(
        FusionBuffer, "fits", lambda _: lambda self, params: True, has(Convert)
    ),
    "a large gradient lies as its parameter did before": Mutation(
        InPlaceGradient, "fits", lambda _: lambda self, params: True, has(Convert)
    ),
    "a state lies as it was received": Mutation(
        broadcast, "laid_out", lambda _: lambda value, param: value, has(Broadcast)
    ),
    "a residual lies as its parameter did before": Mutation(
        compression_state,
        "_in_memory",
        lambda _: lambda part, layout: part,
        lambda p: has(Convert)(p) and uses("compress")(p),
    ),
    "parameters of one element belong to nobody": Mutation(
        divided_parameters, "divide", _loses_pieces_of_one_element, uses("Sharded", "True")
    ),
    "gossip mixes by the next matrix": Mutation(mixer, "mix", _mixes_by_another_matrix, uses("OnePeer")),
    "DiLoCo is due a step later": Mutation(
        fragment.Fragment, "is_due", lambda due: lambda self, step: due(self, step - 1), uses("DiLoCo")
    ),
    "elastic averaging counts from another centre": Mutation(
        elastic_averaging, "follow", _follows_nothing, uses("ElasticAveraging")
    ),
    "more passes a threshold": Mutation(
        threshold, "at_least", lambda keep: lambda flat, value: keep(flat, value / 2), uses("Threshold")
    ),
}
QUICK = ("an overflow of pieces is not told", "1-bit optimizers average no gradients")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MUTATIONS]
)
def test_a_mutation_is_found(monkeypatch, name):
    mutation, backend = MUTATIONS[name], ThreadsBackend()
    right = getattr(mutation.owner, mutation.name)
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.wrong(right))
    for number, seed in enumerate(range(ENOUGH), 1):
        program = draw(seed)
        if mutation.needs(program) and (verdict := backend.run(program)).is_fault:
            print(f"found by program {number}: {verdict.kind}")
            return
    pytest.fail(f"{ENOUGH} programs do not find it")
