"""What a process remembers decides on later steps: it is in the state, or made again where that is read."""

from __future__ import annotations

import copy

import pytest
import torch

import mpisgd
from mpisgd.elastic.state_handlers import handler_for
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods.strategy.local_scaling import LocalScaling
from mpisgd.tools.verification.programs.events import Backward, Broadcast, Reload, Step, ZeroGrad
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

FP16 = mpisgd.Compression.fp16
THIRD = torch.full((3, 2), 1 / 3, dtype=torch.float64)  # which fp16 has not


def check(*events, layers, optimizer, ranks=2, ranks_per_host=0, seed=0):
    program = Program(seed, ranks, ranks_per_host, False, tuple(layers), (optimizer,), events)
    verdict = ThreadsBackend().run(program)
    assert verdict.kind == "ok", f"{verdict.kind}: {verdict.text}"


def made_parameters():
    """Return a table and a vector, alike on all ranks."""
    return [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3, 2), (3,))]


def sparse_gradient():
    indices, values = torch.tensor([[1]]), torch.ones(1, 2, dtype=torch.float64)
    return torch.sparse_coo_tensor(indices, values, (3, 2), check_invariants=True)


def step_sparse(optimizer, table):
    table.grad = sparse_gradient()
    optimizer.step()
    optimizer.zero_grad()


def is_rounded(optimizer, table):
    """Return whether a dense gradient of the table is, by a step with lr=1."""
    before = table.detach().clone()
    table.grad = THIRD.clone()
    optimizer.step()
    return not torch.allclose(before - table.detach(), THIRD, rtol=1e-9)


# --- which parameters have had sparse gradients -------------------------------------------------------------


@pytest.mark.parametrize("compression", ["Compression.fp16", "compress.TopK(ratio=0.5)"])
@pytest.mark.parametrize("between", [(Reload(), Reload()), (Reload(), Broadcast())])
def test_what_was_sparse_is_in_a_state_that_is_saved_before_the_next_step(compression, between):
    events = [Backward((2,)), Step(), ZeroGrad(), *between, Backward((3,)), Step(), ZeroGrad()]
    check(
        *(*events, Backward((5,)), Step()),
        layers=[Layer("partly sparse", (5, 2)), Layer(shape=(3,))],
        optimizer=Optimizer("SGD", (("lr", 0.25),), (0, 1), (("compression", f"mpisgd.{compression}"),)),
        seed=6,
    )


def test_a_rank_alone_saves_what_was_sparse_among_several():
    kept = CompressionState()
    kept.take({"2": {"sparse": True}}, None)
    assert kept.pieces().alike == {"2": {"sparse": True}}


def test_what_was_sparse_stays_so_while_it_is_frozen():
    def program():
        table, vector = made_parameters()
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([table, vector], lr=1.0), compression=FP16)
        step_sparse(optimizer, table)
        table.requires_grad_(False)
        vector.grad = torch.ones(3, dtype=torch.float64)
        optimizer.step()
        optimizer.zero_grad()
        table.requires_grad_(True)
        return is_rounded(optimizer, table)

    assert run_ranks(2, program) == [False, False]


CODES = "mpisgd.compress.BlockQuantized(bits=8, block=64)"


@pytest.mark.parametrize("what", ["gradients", "parameters"])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_was_sparse_is_divided_alike_when_codes_travel_between_hosts(what, stage):
    strategy = f"mpisgd.Sharded(stage={stage}, {what}={CODES})"
    check(
        *(Backward((2,)), Step(), ZeroGrad(), Reload(), Backward((3,)), Step(), ZeroGrad()),
        *(Backward((5,)), Step(), ZeroGrad(), Backward((4,)), Step()),
        layers=[Layer("partly sparse", (11, 3)), Layer(shape=(300,)), Layer("partly sparse", (70, 2))],
        optimizer=Optimizer("SGD", (("lr", 0.25),), (0, 1, 2), (("strategy", strategy),)),
        ranks=2,
        ranks_per_host=1,
        seed=6,
    )


@pytest.mark.parametrize(
    ("option", "ranks_per_host"),
    [
        (("compression", "mpisgd.compress.RandomK(ratio=0.5)"), 0),
        (("compression", "mpisgd.compress.QSGD(bits=4)"), 0),
        (("strategy", f"mpisgd.Sharded(stage=1, gradients={CODES})"), 1),
    ],
)
def test_what_becomes_sparse_after_a_load_leaves_the_buckets_when_it_would_have(option, ranks_per_host):
    """The table has its first gradient in the second step: until then it lies in a bucket with others."""
    check(
        *(Backward((2,)), Step(), ZeroGrad(), Reload(), Backward((3,)), Step(), ZeroGrad()),
        *(Backward((4,)), Step(), ZeroGrad(), Backward((5,)), Step()),
        layers=[Layer(shape=(7,)), Layer("sparse", (200, 1), used_by="odd"), Layer(shape=(7,))],
        optimizer=Optimizer("SGD", (("lr", 0.25),), (0, 1, 2), (option,)),
        ranks_per_host=ranks_per_host,
        seed=210837,
    )


@pytest.mark.parametrize("by_handler", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_shards_of_a_state_say_what_was_sparse(by_handler, stage):
    def program():
        params = made_parameters()

        def new():
            return mpisgd.DistributedOptimizer(
                torch.optim.SGD(params, lr=1.0), strategy=mpisgd.Sharded(stage), compression=FP16
            )

        optimizer = new()
        step_sparse(optimizer, params[0])
        if by_handler:
            saved = handler_for(optimizer).save(None)
            optimizer = new()
            handler_for(optimizer).restore(saved)
        else:
            shards = [None] * mpisgd.size()
            mpisgd.all_gather_object(shards, optimizer.shard_state_dict())
            optimizer = new()
            optimizer.load_shard_state_dicts(shards)
        return is_rounded(optimizer, params[0])

    assert run_ranks(2, program) == [False, False]


def test_ranks_that_have_nothing_of_their_own_ask_nobody_for_the_state_when_ranks_join():
    def program():
        table, vector = made_parameters()
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([table, vector], lr=1.0, momentum=0.0), compression=FP16, share_parameters=True
        )
        step_sparse(optimizer, table)
        return handler_for(optimizer).keep_own() if mpisgd.rank() == 0 else None

    assert run_ranks(2, program) == [None, None]


def test_ranks_take_back_their_own_without_those_that_have_joined():
    """Here the last rank is as one that has joined: it has nothing, and takes nothing back."""

    def program():
        params = made_parameters()
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0, momentum=0.5),
            compression=mpisgd.compress.TopK(ratio=0.4),
            share_parameters=True,
        )
        for number, param in enumerate(params):
            param.grad = torch.arange(param.numel(), dtype=torch.float64).view(param.shape) + number
        optimizer.step()
        before, handler = optimizer.method_entry()["mpisgd"]["own"], handler_for(optimizer)
        before, is_new = copy.deepcopy(before), mpisgd.rank() == mpisgd.size() - 1
        kept = None if is_new else handler.keep_own()
        handler.sync()
        handler.return_own(kept)
        after = optimizer.method_entry()["mpisgd"]["own"]
        return str(after) == str(before), bool(after)

    *others, (_, has_own) = run_ranks(3, program)
    assert others == [(True, True)] * 2
    assert not has_own


def test_sparse_gradients_are_reset_to_sparse_ones_after_a_group_was_added():
    def program():
        table, vector = made_parameters()
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), strategy=mpisgd.Sharded(1))
        table.grad = sparse_gradient()
        optimizer.step()
        optimizer.add_param_group({"params": [vector]})
        optimizer.zero_grad(set_to_none=False)
        return table.grad.is_sparse

    assert run_ranks(2, program) == [True, True]


# --- counts, settings, and what is combined -----------------------------------------------------------------


class Slowing(torch.optim.Optimizer):
    """Steps by 1 / n of the gradient in step n, which it counts in its groups."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["taken"])


def test_what_an_outer_optimizer_counts_is_that_of_the_state_that_was_loaded():
    def program():
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        strategy = mpisgd.DiLoCo(1, outer_optimizer=Slowing)
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), strategy=strategy)

        def train(steps):
            for _ in range(steps):
                param.grad = torch.ones_like(param)
                optimizer.step()
            return param.detach().clone()

        begun, saved = train(2), copy.deepcopy(optimizer.state_dict())
        once = train(2)
        with torch.no_grad():
            param.copy_(begun)
        optimizer.load_state_dict(saved)
        return torch.equal(train(2), once)

    assert run_ranks(2, program) == [True, True]


def test_a_warm_up_that_is_loaded_has_the_parameters_that_were_added_after_it():
    def program():
        first, added = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([first], lr=1.0), strategy=mpisgd.LocalSGD(4, warmup_steps=1)
        )

        def step(*params):
            for param in params:
                param.grad = torch.full_like(param, mpisgd.rank())
            optimizer.step()
            optimizer.zero_grad()

        step(first)
        optimizer.add_param_group({"params": [added]})
        plain = torch.optim.SGD([{"params": [first]}, {"params": [added]}], lr=1.0).state_dict()
        optimizer.load_state_dict(plain)  # which says nothing of steps
        step(first, added)
        return added.tolist()

    assert run_ranks(2, program) == [[-0.5, -0.5]] * 2


def test_ranks_count_steps_without_a_gradient_alike_after_a_broadcast():
    check(
        *(Backward((1,)), Step(), ZeroGrad(), Step(), Broadcast(1), Backward((2,)), Step()),
        layers=[Layer(shape=(4, 3)), Layer()],
        optimizer=Optimizer("Dion", (("lr", 0.01),), (0, 1)),
    )


def test_gradients_that_a_failed_step_has_hidden_do_not_come_back_over_new_ones():
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaling = LocalScaling(optimizer)
    param.grad = torch.full((2,), torch.inf)
    optimizer.found_inf = torch.ones(())
    scaling.before_step(optimizer)
    assert param.grad is None  # and the step raises
    param.grad, optimizer.found_inf = torch.ones(2), torch.zeros(())
    scaling.before_step(optimizer)
    assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("resets", [False, True])
def test_gradients_that_a_failed_step_has_hidden_come_back_unless_they_were_reset(resets):
    def program():
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), strategy=mpisgd.LocalSGD(2))
        param.grad = torch.full((2,), torch.inf)
        optimizer.found_inf = torch.ones(())
        optimizer.synchronizer.before_step()
        if resets:
            optimizer.zero_grad()
        optimizer.found_inf = torch.zeros(())
        optimizer.synchronizer.before_step()
        return param.grad is None

    assert run_ranks(1, program) == [resets]
