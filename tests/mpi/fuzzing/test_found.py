"""Faults that random programs have found, each with the smallest one that fails."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, referee

import mpisgd
from mpisgd.tools.verification.programs.events import AddGroup, Backward, Step, Synchronize, ZeroGrad
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program
from mpisgd.tools.verification.programs.try_out import try_out


def check(*events, layers, optimizers):
    """Run a program and compare it with one process."""
    program = Program(0, mpisgd.size(), 0, True, tuple(layers), tuple(optimizers), events)
    verdict = try_out(program, mpisgd.rank(), referee().allgather)
    everyone(verdict.kind == "ok", f"{verdict.kind}: {verdict.text}")


# Seeds 30, 111 and 305. Where gradients are divided `zero_grad(set_to_none=False)` made them None: a step
# without a backward neither decayed weights nor went on with momentum.


@pytest.mark.parametrize("options", [("share_parameters", "True"), ("strategy", "mpisgd.Sharded()")], ids=str)
@pytest.mark.parametrize("setting", ["weight_decay", "momentum"])
def test_a_step_after_a_reset_to_zero(options, setting):
    optimizer = Optimizer("SGD", (("lr", 0.5), (setting, 0.5)), (0, 1), (options,))
    events = [Backward((1,)), Step(), ZeroGrad(set_to_none=False), Step()]
    check(
        *events,
        ZeroGrad(),
        Backward((2,)),
        Step(),
        layers=[Layer(), Layer(used_by="first")],
        optimizers=[optimizer],
    )


# Seed 277. An optimizer whose parameters a later one has taken got a parameter of its own, and the group
# did not know: a rank without a backward reduced that of the later one, and the others that of the first.


@pytest.mark.mpi(min_size=2)
def test_a_group_added_to_an_optimizer_that_had_nothing_to_do():
    optimizers = [Optimizer(layers=(0,)), Optimizer(layers=(0,))]
    events = [AddGroup(1), Backward((1,), skipped=(0,)), Step()]
    check(*events, layers=[Layer(), Layer()], optimizers=optimizers)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers make such tensors
@pytest.mark.parametrize("options", [{"share_parameters": True}, {"strategy": mpisgd.Sharded()}], ids=str)
def test_a_reset_to_zero_leaves_sparse_gradients_sparse(options):
    table = torch.nn.Embedding(4, 2, sparse=True).double()
    mpisgd.broadcast_parameters(table)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()), **options)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        table(torch.tensor([mpisgd.rank()])).sum().backward()
        optimizer.step()
    everyone(bool(table.weight.isfinite().all()))


# Seed 9492. Parameters without elements, after all others, belonged to no fragment: IndexError in a step.


def test_diloco_takes_parameters_without_elements_at_the_end():
    optimizer = Optimizer(layers=(0, 1), options=(("strategy", "mpisgd.DiLoCo(2)"),))
    check(Backward((1,)), Step(), Step(), layers=[Layer(), Layer(shape=(0,))], optimizers=[optimizer])


# Seeds 243 and 30272. After its update a piece that is a whole parameter had no gradient any more on its
# owner, and one on all others: they published different parameters.


@pytest.mark.parametrize("options", [("share_parameters", "True"), ("strategy", "mpisgd.Sharded()")], ids=str)
def test_a_whole_parameter_keeps_its_gradient_after_the_step(options):
    optimizer = Optimizer(layers=(0,), options=(options,))
    events = [Backward((1,)), Step(), Synchronize(), ZeroGrad(), Backward((2,)), Step()]
    check(*events, layers=[Layer(shape=(0,))], optimizers=[optimizer])


# Seed 2413. The same of a table that had sparse gradients, and is reset to zero.


def test_a_table_that_was_sparse_is_reset_to_zero():
    optimizer = Optimizer(layers=(0,), options=(("strategy", "mpisgd.Sharded()"),))
    events = [Backward((1,)), Step(), AddGroup(1), ZeroGrad(set_to_none=False), Step(), ZeroGrad()]
    layers = [Layer(kind="sparse", shape=(11, 3)), Layer()]
    check(*events, Backward((2,)), Step(), layers=layers, optimizers=[optimizer])
