"""`join`: ranks that run out of data go on with the others, and all compute what one process computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import mpisgd
from mpisgd import elastic
from mpisgd.job.threads_as_ranks import RankFailed, lose_ranks, run_ranks

BATCHES = (5, 3, 0, 4)  # of each rank


def batch(rank: int, step: int, shape: tuple[int, ...] = (3,)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = 2 + (rank + step) % 3
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def joined(ranks: int, step: int, shape: tuple[int, ...] = (3,)) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of a step of all ranks that have one."""
    found = [batch(rank, step, shape) for rank in range(ranks) if step < BATCHES[rank]]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def normed_model(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 1), norm(4), nn.Flatten(), nn.Linear(8, 2)).double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten().double() for value in model.state_dict().values()])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def refused(size: int, program: Callable[[], Any], *texts: str, kind: type = mpisgd.InvalidArgument) -> None:
    """All ranks raise the same."""

    def body() -> str:
        with pytest.raises(kind) as caught:
            program()
        return str(caught.value)

    for each in run_ranks(size, body):
        for text in texts:
            assert text in each


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": mpisgd.Sharded(stage=1)},
        {"strategy": mpisgd.Sharded(stage=2)},
        {"share_parameters": True},
        {"strategy": mpisgd.ParameterServer(mode="sync")},
    ],
)
def test_adamw_equals_one_process_on_the_joined_uneven_batches(size, options, norm_type):
    def program():
        model = plain_model()
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        with optimizer.join() as uneven:
            for step in range(BATCHES[mpisgd.rank()]):
                x, y = batch(mpisgd.rank(), step)
                uneven.next_batch(examples=len(x))
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.clip_grad_norm_(0.2, norm_type)
                optimizer.step()
        mpisgd.check_in_sync(model)
        mpisgd.check_in_sync(optimizer)
        return flat(model)

    right = plain_model()
    optimizer = torch.optim.AdamW(right.parameters(), lr=0.1)
    for step in range(max(BATCHES[:size])):
        optimizer.zero_grad()
        loss_of(right, *joined(size, step)).backward()
        nn.utils.clip_grad_norm_(right.parameters(), 0.2, norm_type)
        optimizer.step()
    for end in run_ranks(size, program):
        torch.testing.assert_close(end, flat(right), rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_batch_norm_equals_that_of_one_process(size):
    def program():
        others = [mpisgd.SyncBatchNorm(2) for _ in range(mpisgd.rank())]  # of this rank's own
        model = normed_model(lambda channels: mpisgd.SyncBatchNorm(channels))
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with optimizer.join() as uneven:
            for step in range(BATCHES[mpisgd.rank()]):
                x, y = batch(mpisgd.rank(), step, (3, 2))
                uneven.next_batch(examples=len(x))
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        mpisgd.check_in_sync(model)  # and so are the running statistics
        assert len(others) == mpisgd.rank()
        return flat(model)

    right = normed_model(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    for step in range(max(BATCHES[:size])):
        optimizer.zero_grad()
        loss_of(right, *joined(size, step, (3, 2))).backward()
        optimizer.step()
    for end in run_ranks(size, program):
        torch.testing.assert_close(end, flat(right), rtol=0, atol=1e-12)


def test_lbfgs_follows_what_a_closure_computes():
    def program():
        model = plain_model()
        optimizer = mpisgd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.5))
        with optimizer.join() as uneven:
            for step in range(BATCHES[mpisgd.rank()]):
                x, y = batch(mpisgd.rank(), step)
                uneven.next_batch(examples=len(x))
                optimizer.step(lambda x=x, y=y: closure(model, optimizer, x, y))
        mpisgd.check_in_sync(optimizer)
        return flat(model)

    def closure(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    right = plain_model()
    optimizer = torch.optim.LBFGS(right.parameters(), max_iter=3, lr=0.5)
    for step in range(max(BATCHES[:3])):
        optimizer.step(lambda step=step: closure(right, optimizer, *joined(3, step)))
    for end in run_ranks(3, program):
        torch.testing.assert_close(end, flat(right), rtol=0, atol=1e-9)


def test_two_optimizers_of_which_a_rank_reaches_one():
    """The loss of rank 1 uses the second part alone; its examples count in the mean of the first, too."""

    def parts():
        torch.manual_seed(0)
        return nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def loss(first, second, rank, step):
        x, y = batch(rank, step)
        out = second(x) if rank == 1 else first(x) + second(x)
        return (out - y).square().sum(), len(x)

    def program():
        first, second = parts()
        optimizers = [
            mpisgd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5))
            for part in (first, second)
        ]
        with mpisgd.join(*optimizers) as uneven:
            for step in range(BATCHES[mpisgd.rank()]):
                total, rows = loss(first, second, mpisgd.rank(), step)
                uneven.next_batch(examples=rows)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (total / rows).backward()
                for optimizer in optimizers:
                    optimizer.step()
        return torch.cat([flat(first), flat(second)])

    first, second = parts()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in (first, second)]
    for step in range(max(BATCHES[:3])):
        found = [loss(first, second, rank, step) for rank in range(3) if step < BATCHES[rank]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        (torch.stack([total for total, _ in found]).sum() / sum(rows for _, rows in found)).backward()
        for optimizer in optimizers:
            optimizer.step()
    right = torch.cat([flat(first), flat(second)])
    for end in run_ranks(3, program):
        torch.testing.assert_close(end, right, rtol=0, atol=1e-13)


def test_sparse_gradients():
    def table():
        torch.manual_seed(0)
        return nn.Embedding(6, 2, sparse=True).double()

    def rows(rank, step):
        return torch.arange(2 + (rank + step) % 3) + step

    def program():
        model = table()
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with optimizer.join() as uneven:
            for step in range(BATCHES[mpisgd.rank()] - 1):
                places = rows(mpisgd.rank(), step) % 6
                uneven.next_batch(examples=len(places))
                optimizer.zero_grad()
                model(places).square().sum(1).mean().backward()
                optimizer.step()
        return flat(model)

    right = table()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    for step in range(max(BATCHES[:2]) - 1):
        places = torch.cat([rows(rank, step) % 6 for rank in range(2) if step < BATCHES[rank] - 1])
        optimizer.zero_grad()
        right(places).square().sum(1).mean().backward()
        optimizer.step()
    kept = len(torch._utils._sparse_tensors_to_validate)
    for end in run_ranks(2, program):
        torch.testing.assert_close(end, flat(right), rtol=0, atol=1e-13)
    # torch 2.14 warned in the next torch.load: sparse gradients that were pickled on their way stay in there.
    assert len(torch._utils._sparse_tensors_to_validate) == kept


class Stream(IterableDataset):
    """As many rows as nobody knows before."""

    def __iter__(self):
        for step in range(BATCHES[mpisgd.rank()]):
            yield from zip(*batch(mpisgd.rank(), step), strict=True)


def test_an_iterable_dataset_with_a_smaller_last_batch():
    def program():
        model, seen = plain_model(), []
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with optimizer.join() as uneven:
            for x, y in DataLoader(Stream(), batch_size=4):
                seen.append((x, y))
                uneven.next_batch(examples=len(x))
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        return flat(model), seen

    ends = run_ranks(3, program)
    assert len({len(seen[-1][0]) for _, seen in ends if seen}) > 1
    right = plain_model()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    for step in itertools.count():
        found = [seen[step] for _, seen in ends if step < len(seen)]
        if not found:
            break
        optimizer.zero_grad()
        loss_of(right, torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])).backward()
        optimizer.step()
    for end, _ in ends:
        torch.testing.assert_close(end, flat(right), rtol=0, atol=1e-13)


def test_clipping_that_no_version_counter_sees():
    def program():
        model = plain_model()
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        with optimizer.join():
            for step in range(1 + mpisgd.rank()):
                optimizer.zero_grad()
                loss_of(model, *batch(0, step)).backward()
                for param in model.parameters():
                    param.grad.data.clamp_(-0.01, 0.01)
                optimizer.step()
        mpisgd.check_in_sync(model)

    run_ranks(2, program)


@pytest.mark.parametrize("batches", [(4, 3), (3, 3), (3, 2)])
def test_what_is_left_of_a_window_counts(batches):
    """With the rest of it on other ranks, or, where nobody fills it, in a step after the block."""

    def program():
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), backward_passes_per_step=2)
        with optimizer.join():
            for step in range(batches[mpisgd.rank()]):
                (param * torch.tensor([1.0, 8.0 * (mpisgd.rank() + 1)])).sum().div(2).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.step()
        return param.detach().clone()

    # A whole window of both, and what is left: of k passes in it, the mean of all of them times k / 2.
    left = {(4, 3): (2, [8, 8, 16]), (3, 3): (1, [8, 16]), (3, 2): (1, [8])}[batches]
    second = left[0] / 2 * sum(left[1]) / len(left[1])
    expected = torch.tensor([-1.0 - left[0] / 2, -12.0 - second], dtype=torch.float64)
    for end in run_ranks(2, program):
        torch.testing.assert_close(end, expected)


@pytest.mark.parametrize(
    "options", [{}, {"strategy": mpisgd.Sharded(stage=2)}, {"strategy": mpisgd.LocalSGD(sync_every=2)}]
)
def test_gradients_after_the_block_are_those_of_who_trained_longest(options):
    """A program that resets them after each step does not do so on ranks that have run out of data."""

    def program():
        model, optimizer = wrapped(**options)
        for _ in range(2):
            with optimizer.join():
                for step in range(2 + 2 * mpisgd.rank()):
                    loss_of(model, *batch(mpisgd.rank(), step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(model), [param.grad is None for param in model.parameters()]

    def reset_before():
        model, optimizer = wrapped(**options)
        for _ in range(2):
            with optimizer.join():
                train(model, optimizer, 2 + 2 * mpisgd.rank())
        return flat(model)

    for (end, are_none), other in zip(run_ranks(3, program), run_ranks(3, reset_before), strict=True):
        assert end.equal(other)
        assert all(are_none)


# --- collectives of one's own ---------------------------------------------------------------------------


def test_all_reduce_takes_those_that_have_data():
    def program():
        rank, seen = mpisgd.rank(), []
        with mpisgd.join() as uneven:
            for step in range(rank + 1):
                uneven.next_batch(examples=rank + 1)
                found = []
                for op in ("sum", "avg", "product", "min", "max"):
                    value = torch.tensor([float(rank + 2 + step)])
                    mpisgd.all_reduce(value, op)
                    found.append(value.item())
                bits = torch.tensor([1 << rank])
                mpisgd.all_reduce(bits, "bor")
                mpisgd.barrier()
                seen.append((*found, bits.item()))
        return seen

    ends = run_ranks(3, program)
    assert ends[2][0] == pytest.approx((9.0, (2 * 1 + 3 * 2 + 4 * 3) / 6, 24.0, 2.0, 4.0, 7))
    assert ends[2][1] == pytest.approx((9.0, (4 * 2 + 5 * 3) / 5, 20.0, 4.0, 5.0, 6))
    assert ends[2][2] == pytest.approx((6.0, 6.0, 6.0, 6.0, 6.0, 4))
    assert ends[1] == ends[2][:2]
    assert ends[0] == ends[2][:1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: mpisgd.broadcast(torch.zeros(1), 0),
        lambda: mpisgd.broadcast_object(0),
        lambda: mpisgd.isend(torch.zeros(1), 0),
        lambda: mpisgd.check_in_sync({"x": torch.zeros(1)}),
        lambda: mpisgd.new_group([0, 1]),
    ],
)
def test_other_collectives_are_refused_before_anybody_has_run_out(call):
    def program():
        with mpisgd.join():
            call()

    refused(2, program, "does not go inside join()", "call it after the `with` block")


def test_a_group_of_other_ranks_is_refused():
    def program():
        part = mpisgd.new_group([0, 1])
        with mpisgd.join():
            if mpisgd.rank() < 2:
                mpisgd.all_reduce(torch.zeros(1), group=part)
            else:
                mpisgd.broadcast(torch.zeros(1), 0)

    refused(3, program, "does not go inside join()")


# --- what does not go -----------------------------------------------------------------------------------


def wrapped(**options: Any) -> Any:
    model = plain_model()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int, then: Callable[[], Any] = lambda: None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(mpisgd.rank(), step)).backward()
        optimizer.step()
        then()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": mpisgd.Gossip(mpisgd.gossip.Ring())}, "Gossip"),
        ({"strategy": mpisgd.ElasticAveraging()}, "ElasticAveraging"),
        ({"strategy": mpisgd.LocalSGD(hierarchy={"host": 1, "job": 2})}, "means over hosts"),
        ({"op": mpisgd.Adasum}, "no gradient counts nothing"),
        ({"compression": mpisgd.compress.SignSGD()}, "SignSGD"),
        ({"compression": mpisgd.compress.DeepGradient(ratio=0.5)}, "momentum"),
    ],
)
def test_methods_without_it_are_refused_at_the_beginning(options, text):
    def program():
        _, optimizer = wrapped(**options)
        with optimizer.join():
            raise AssertionError("it has begun")

    refused(2, program, "join: ", text)


def test_an_optimizer_that_averages_by_itself_is_refused():
    def program():
        with mpisgd.join(mpisgd.OneBitAdam(plain_model().parameters(), lr=0.1, freeze_step=2)):
            raise AssertionError("it has begun")

    refused(2, program, "OneBitAdam is no mpisgd.DistributedOptimizer")


def test_all_optimizers_of_the_ranks_must_be_inside():
    def program():
        _, optimizer = wrapped()
        other_model, other = wrapped()
        with optimizer.join():
            train(other_model, other, 1)

    refused(2, program, "join all of them together")


def test_an_optimizer_that_trains_no_more_may_be_outside():
    def program():
        done_model, done = wrapped()
        train(done_model, done, 1)
        model, optimizer = wrapped()
        with optimizer.join():
            train(model, optimizer, 1 + mpisgd.rank())
        mpisgd.check_in_sync(model)
        train(done_model, done, 1)

    run_ranks(2, program)


def test_gradients_from_before_are_refused():
    def program():
        model, optimizer = wrapped()
        with optimizer.no_sync():
            loss_of(model, *batch(0, 0)).backward()
        with optimizer.join():
            raise AssertionError("it has begun")

    refused(2, program, "accumulated before")


def test_ranks_with_other_arguments_are_refused():
    def program():
        _, optimizer = wrapped()
        with optimizer.join(throw_on_early_termination=mpisgd.rank() == 1):
            raise AssertionError("it has begun")

    refused(2, program, "different arguments", "rank 1: ")


def test_a_block_inside_another_one_is_refused():
    def program():
        _, optimizer = wrapped()
        with optimizer.join(), mpisgd.join():
            raise AssertionError("it has begun")

    refused(2, program, "inside join() already")


@pytest.mark.parametrize("kind", ["scheduler", "scaler"])
def test_what_keeps_count_must_be_named(kind):
    """It would be behind on the ranks that have run out of data, and go on so after the block."""

    def program():
        model, optimizer = wrapped()
        if kind == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            with optimizer.join():
                for step in range(2 * mpisgd.rank()):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, *batch(0, step))).backward()
                    scaler.step(optimizer)
            return
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with optimizer.join():
            train(model, optimizer, 2 * mpisgd.rank(), scheduler.step)

    refused(3, program, f"follow=[{kind}]")


def test_a_rank_must_say_how_many_examples_it_has_if_others_do():
    def program():
        model, optimizer = wrapped()
        with optimizer.join() as uneven:
            if mpisgd.rank():
                uneven.next_batch(examples=2)
            train(model, optimizer, 1)

    refused(2, program, "rank 1 said how many examples")


def test_sums_are_not_weighted():
    def program():
        _, optimizer = wrapped(op="sum")
        with optimizer.join() as uneven:
            uneven.next_batch(examples=2)

    refused(2, program, "op=SUM")


def test_ranks_that_have_data_must_do_the_same():
    def program():
        model, optimizer = wrapped()
        with optimizer.join():
            if mpisgd.rank() == 0:
                return
            if mpisgd.rank() == 1:
                train(model, optimizer, 1)
            else:
                mpisgd.barrier()

    texts = ("that have data must do the same", "rank 1: reduce(1)", "rank 2: barrier(", "rank 0: takes part")
    refused(3, program, *texts, kind=mpisgd.CollectiveMismatch)


@pytest.mark.parametrize("name", ["load_state_dict", "add_param_group"])
def test_an_optimizer_stays_what_it_is(name):
    def program():
        _, optimizer = wrapped()
        with optimizer.join():
            getattr(optimizer, name)({"params": [nn.Parameter(torch.zeros(1))]})

    refused(2, program, f"{name}() does not go inside join()")


# --- the end --------------------------------------------------------------------------------------------


def trained(block: Any, model: nn.Module, optimizer: Any, then: Callable[[str], Any] = str) -> None:
    with block:
        train(model, optimizer, BATCHES[mpisgd.rank()], lambda: then("a key"))


def test_early_termination_is_thrown_on_all_ranks():
    def program():
        model, optimizer = wrapped()
        with pytest.raises(RuntimeError, match=r"rank 2 of group 'world' has no more data"):
            trained(optimizer.join(throw_on_early_termination=True), model, optimizer)
        train(model, optimizer, 1)  # the block has ended on all of them
        mpisgd.check_in_sync(model)

    run_ranks(3, program)


def test_an_exception_inside_ends_the_block():
    def program():
        model, optimizer = wrapped()
        with pytest.raises(KeyError):
            trained(optimizer.join(), model, optimizer, {}.__getitem__)
        train(model, optimizer, 1)
        mpisgd.broadcast(torch.zeros(1), 0)

    run_ranks(2, program)


@pytest.mark.filterwarnings("ignore:.*failed and nobody waited:RuntimeWarning")
@pytest.mark.parametrize("lost", [0, 2])
def test_the_others_go_on_where_a_rank_is_lost_inside(lost):
    """Rank 2 has run out of data, or rank 0 is in the middle of its own."""

    def program():
        me, (model, optimizer) = mpisgd.rank(), wrapped()
        state = elastic.State(model=model, optimizer=optimizer, epoch=0)
        tries = []

        @elastic.run
        def go_on(state):
            tries.append(mpisgd.size())
            while state.epoch < 2:
                with state.optimizer.join():
                    for step in range(4 - me):
                        if me == lost and state.epoch == 1:
                            lose_ranks(lost)
                        state.optimizer.zero_grad()
                        loss_of(state.model, *batch(me, step)).backward()
                        state.optimizer.step()
                state.epoch += 1
                state.commit()

        go_on(state)
        mpisgd.check_in_sync(state.model)
        return tries

    ends = run_ranks(3, program, losses=())
    assert [end for rank, end in enumerate(ends) if rank != lost] == [[3, 2]] * 2


def test_a_second_block_goes_on_from_the_first():
    def program():
        model, optimizer = wrapped(strategy=mpisgd.LocalSGD(sync_every=2))
        for _ in range(2):
            with optimizer.join():
                train(model, optimizer, BATCHES[mpisgd.rank()])
        train(model, optimizer, 2)  # twice five steps were an even number
        mpisgd.check_in_sync(model)

    run_ranks(3, program)


def test_it_does_nothing_where_it_is_not_enabled():
    def program():
        model, optimizer = wrapped()
        with optimizer.join(enable=False) as uneven:
            uneven.next_batch(examples=3)
            train(model, optimizer, 2)
            mpisgd.broadcast(torch.zeros(1), 0)

    run_ranks(2, program)


def test_the_message_where_it_is_missing_names_it():
    def program():
        model, optimizer = wrapped()
        train(model, optimizer, 1 + mpisgd.rank())

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, program)
    assert "with optimizer.join():" in str(caught.value.__cause__)
