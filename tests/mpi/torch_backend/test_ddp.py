"""torch's DistributedDataParallel over MPI equals one process on the joined batch."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp_harness import (
    ADAM_DRIFT,
    DRIFT,
    FEATURES,
    SMALL_MB,
    Trainer,
    adam,
    batch,
    check_equal,
    judge,
    plain_step,
    small_buckets,
    trainers,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from verdicts import everyone, raises_everywhere

pytestmark = pytest.mark.mpi(min_size=2)

# -- buckets and the ways of DDP ----------------------------------------------------------------------

WAYS = {
    "one bucket": {},
    "small buckets": {"bucket_cap_mb": SMALL_MB},
    "views": {"bucket_cap_mb": SMALL_MB, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": SMALL_MB, "static_graph": True},
    "static graph, views": {"bucket_cap_mb": SMALL_MB, "static_graph": True, "gradient_as_bucket_view": True},
    "looking for unused": {"bucket_cap_mb": SMALL_MB, "find_unused_parameters": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_each_way_of_ddp_equals_one_process(way):
    _, ours = check_equal(wrap=partial(DDP, **WAYS[way]))
    told = ours.net._get_ddp_logging_data()
    rebuilt = "find_unused_parameters" not in WAYS[way]  # torch rebuilds none then
    everyone(bool(told["has_rebuilt_buckets"]) == rebuilt)
    buckets = told["rebuilt_bucket_sizes" if rebuilt else "bucket_sizes"].split(", ")
    everyone((len(buckets) > 1) == ("bucket_cap_mb" in WAYS[way]), f"{buckets}")


def test_adam_equals_one_process():
    check_equal(optimizer=adam, tol=ADAM_DRIFT)


# -- accumulation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_no_sync_accumulates_as_one_process_does(view):
    def accumulate(run: Trainer, step: int) -> None:
        run.opt.zero_grad(set_to_none=step % 2 == 0)
        with run.net.no_sync() if run.distributed else contextlib.nullcontext():
            run.loss(step, micro=0).backward()
            run.loss(step, micro=1).backward()
        run.loss(step, micro=2).backward()
        run.opt.step()

    check_equal(accumulate, wrap=partial(small_buckets, gradient_as_bucket_view=view))


# -- parameters that are not used ---------------------------------------------------------------------


class Branches(nn.Module):
    """Rank r (of the joined batch: part r) takes branch r; one more branch is for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(FEATURES, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 2) for _ in range(dist.get_world_size() + 1))

    def forward(self, x, branch):
        return self.branches[branch](torch.tanh(self.shared(x)))


def by_branch(run: Trainer, step: int) -> None:
    """One process takes the mean of what the ranks do; at odd steps all take the same branch."""
    size = dist.get_world_size()
    inputs, targets = (tensor.chunk(size) for tensor in batch(step))
    run.opt.zero_grad()
    parts = [run.rank] if run.distributed else range(size)
    losses = [
        nn.functional.mse_loss(run.net(inputs[part], 0 if step % 2 else part), targets[part])
        for part in parts
    ]
    torch.stack(losses).mean().backward()
    run.opt.step()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_parameters_used_by_some_ranks_or_by_none(view):
    wrap = partial(small_buckets, find_unused_parameters=True, gradient_as_bucket_view=view)
    plain, ours = check_equal(by_branch, model=Branches, wrap=wrap)
    for run in (plain, ours):
        everyone(run.model.branches[-1].weight.grad is None, "a gradient that nobody made")


class TwoHeads(nn.Module):
    """Its second output is left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(FEATURES, 5), nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

    def forward(self, x):
        return [head(torch.tanh(self.body(x))) for head in self.heads]


def test_outputs_may_be_left_out_of_the_loss():
    def one_head(run: Trainer, step: int) -> None:
        inputs, targets = run.rows(step)
        run.opt.zero_grad()
        nn.functional.mse_loss(run.net(inputs)[step % 2], targets).backward()
        run.opt.step()

    check_equal(one_head, model=TwoHeads, wrap=partial(small_buckets, find_unused_parameters=True))


# -- uneven inputs ------------------------------------------------------------------------------------


def uneven(run: Trainer, whole: bool) -> None:
    """Rank r has r + 1 batches; one process takes the mean over all ranks, or over those that are left."""
    size = dist.get_world_size()
    steps = run.rank + 1 if run.distributed else size
    for step in range(steps):
        inputs, targets = (tensor.chunk(size) for tensor in batch(step))
        there = [run.rank] if run.distributed else range(step, size)
        losses = [nn.functional.mse_loss(run.net(inputs[part]), targets[part]) for part in there]
        run.opt.zero_grad()
        (torch.stack(losses).sum() / (1 if run.distributed else size if whole else size - step)).backward()
        run.opt.step()


@pytest.mark.parametrize("whole", [True, False], ids=["by all ranks", "by those that are left"])
def test_join_takes_uneven_inputs(whole):
    plain, ours = trainers()
    uneven(plain, whole)
    with ours.net.join(divide_by_initial_world_size=whole):
        uneven(ours, whole)
    print(f"max difference {judge(plain.model.parameters(), ours.model.parameters(), DRIFT):.1e}")


def test_join_can_raise_where_inputs_end_early():
    _, ours = trainers()
    with raises_everywhere(RuntimeError) as caught, ours.net.join(throw_on_early_termination=True):
        uneven(ours, True)
    everyone("exhausted" in caught.text, caught.text)


def test_join_can_be_switched_off():
    plain, ours = trainers()
    with ours.net.join(enable=False):
        plain_step(ours, 0)
    plain_step(plain, 0)
    judge(plain.model.parameters(), ours.model.parameters(), DRIFT)


# -- module buffers -----------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def test_batch_norm_follows_the_first_rank():
    def by_part(run: Trainer, step: int) -> None:
        """Each rank normalizes its own rows; the statistics that stay are those of rank 0."""
        size = dist.get_world_size()
        inputs, targets = (tensor.chunk(size) for tensor in batch(step))
        parts = [run.rank] if run.distributed else range(size)[::-1]  # rank 0's come last and stay
        before = [buffer.clone() for buffer in run.model.buffers()]
        run.opt.zero_grad()
        for part in parts:
            if not run.distributed:
                copy_all(before, run.model.buffers())
            loss = nn.functional.mse_loss(run.net(inputs[part]), targets[part])
            (loss / len(parts)).backward()
        run.opt.step()

    plain, ours = check_equal(by_part, model=normed)
    for run in (plain, ours):
        run.net(batch(0)[0])  # begins with rank 0's buffers, and goes on from them
    judge(plain.model.buffers(), ours.model.buffers(), DRIFT)


def copy_all(sources, targets) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
