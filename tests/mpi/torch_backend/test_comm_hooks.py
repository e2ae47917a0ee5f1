"""Communication hooks of DDP over MPI: torch's own, ours, and one that waits inside a future's callback."""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_harness import (
    DRIFT,
    FEATURES,
    PostLocalSGDOptimizer,
    Trainer,
    check_equal,
    judge,
    plain_step,
    sgd,
    small_buckets,
    trainers,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP
from verdicts import everyone

from mpisgd.torch_backend import bf16_compress

pytestmark = pytest.mark.mpi(min_size=2)

# A 16-bit float keeps 11 or 8 bits. Measured over 4 steps: at most 4e-5 and 3e-4.
HALF_DRIFT = {torch.float16: 4e-4, torch.bfloat16: 4e-3}
# Measured at 2 to 4 ranks: at most 1.2e-14.
MANY, POWER_DRIFT = 20, 1e-12


def hooked(
    hook: Callable[..., Any], state: Any = None, in_ddp: Any = small_buckets
) -> Callable[..., nn.Module]:
    """What wraps a model in DDP with a hook; `state` makes the hook's of a process group."""

    def wrap(model: nn.Module, process_group: Any) -> nn.Module:
        ddp = in_ddp(model, process_group=process_group)
        ddp.register_comm_hook(state and state(process_group), hook)
        return ddp

    return wrap


@pytest.fixture(scope="module")
def alone(default_group: None) -> Iterator[Any]:
    """The group of this rank alone, on which a hook is its own oracle."""
    mine, _ = dist.new_subgroups(group_size=1)
    yield mine
    dist.destroy_process_group(mine)


@pytest.fixture(scope="module")
def half(default_group: None) -> Iterator[Any]:
    """The even ranks or the odd ones."""
    ranks = range(dist.get_world_size())
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks[start::2]) for start in range(2)])
    yield mine
    dist.destroy_process_group(mine)


# -- hooks that average -------------------------------------------------------------------------------


def test_all_reduce_hook_equals_one_process():
    check_equal(wrap=hooked(default_hooks.allreduce_hook))


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [
        (default_hooks.fp16_compress_hook, torch.float16),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16),
        (bf16_compress, torch.bfloat16),
    ],
    ids=["fp16", "fp16 around all_reduce", "bf16"],
)
def test_gradients_travel_as_a_half_type(hook, dtype):
    _, ours = check_equal(wrap=hooked(hook), tol=HALF_DRIFT[dtype])
    for param in ours.model.parameters():
        everyone(
            torch.equal(param.grad.to(dtype).double(), param.grad), "a gradient that no 16-bit float holds"
        )


# -- hooks that wait inside a callback ----------------------------------------------------------------


def scaled_sum(group, bucket):
    """Agree on the largest element, then add what is divided by it: the second waits inside a callback."""
    buffer = bucket.buffer()
    top = buffer.abs().max()
    time.sleep(0.002 * ((bucket.index() + dist.get_rank()) % 2))  # another rank is late at each bucket

    def add_scaled(_: Any) -> torch.Tensor:
        buffer.div_(top)
        dist.all_reduce(buffer, group=group, async_op=True).wait()
        return buffer.mul_(top / dist.get_world_size(group))

    return dist.all_reduce(top, dist.ReduceOp.MAX, group, async_op=True).get_future().then(add_scaled)


def test_hook_may_wait_inside_a_callback():
    check_equal(wrap=hooked(scaled_sum, lambda group: group), steps=8)


class Wide(nn.Module):
    """Matrices large enough for PowerSGD to compress, and biases, which it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)
        )

    def forward(self, x):
        return self.layers(x)


POWER = {
    "rank 1": ({}, small_buckets),
    "rank 2, batched": (
        {"matrix_approximation_rank": 2, "batch_tensors_with_same_shape": True},
        small_buckets,
    ),
    # One bucket, since a cold hook forgets, when it is done with one bucket, what it keeps of the others.
    "cold, forgetting": ({"use_error_feedback": False, "warm_start": False}, DDP),
}


@pytest.mark.parametrize("way", POWER)
def test_power_sgd_equals_its_own_run_on_one_rank(way, alone):
    # It is linear in what is averaged: many ranks do what one does on the joined batch, residuals included.
    given, in_ddp = POWER[way]
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.1, **given}
    wrap = hooked(powerSGD_hook, lambda group: PowerSGDState(group, **options), in_ddp)
    plain, ours = trainers(model=Wide, wrap=wrap)
    plain.net = wrap(plain.model, process_group=alone)
    for step in range(MANY):
        for run in (plain, ours):
            plain_step(run, step)
    worst = judge(plain.model.parameters(), ours.model.parameters(), POWER_DRIFT)
    print(f"max difference {worst:.1e} after {MANY} steps")


# -- averaging models now and then --------------------------------------------------------------------

START, PERIOD = 2, 2


def rows_of(run: Trainer, part: int, parts: int) -> Trainer:
    """The same run on other rows."""
    return Trainer(run.net, run.opt, run.model, part, parts, run.distributed)


def mean_into(models: list[nn.Module], weights: list[float]) -> None:
    """Give all models the weighted mean of their parameters."""
    for params in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(param.detach() * weight for param, weight in zip(params, weights, strict=True))
        for param in params:
            param.data.copy_(mean)


def local_sgd_in_one_process(plain: Trainer, teams: list[list[int]], steps: int) -> list[nn.Module]:
    """Return the model of each team: they go together up to START, then each on its own rows.

    From there on they are averaged at every PERIOD-th step.
    """
    size = sum(map(len, teams))
    runs = []
    for _ in teams:
        model = copy.deepcopy(plain.model)
        runs.append(Trainer(model, sgd(model), model, 0, 1, False))
    for step in range(steps):
        for run, team in zip(runs, teams, strict=True):
            run.opt.zero_grad()
            members = range(size) if step < START else team
            for member in members:
                (rows_of(run, member, size).loss(step) / len(members)).backward()
            run.opt.step()
        if step >= START and (step - START) % PERIOD == 0:
            mean_into([run.model for run in runs], [len(team) / size for team in teams])
    return [run.model for run in runs]


@pytest.mark.parametrize("in_teams", [True, False], ids=["teams of ranks", "every rank alone"])
def test_post_local_sgd_equals_its_teams_in_one_process(in_teams, half, alone):
    def post_local(model: nn.Module) -> torch.optim.Optimizer:
        return PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(PERIOD, warmup_steps=START))

    size, rank, steps = dist.get_world_size(), dist.get_rank(), 6
    teams = [list(range(start, size, 2 if in_teams else size)) for start in range(2 if in_teams else size)]
    wrap = hooked(post_localSGD_hook, lambda group: PostLocalSGDState(group, half, START, in_teams))
    plain, ours = trainers(wrap=wrap, sharded=post_local)
    for step in range(steps):
        plain_step(ours, step)
    oracles = local_sgd_in_one_process(plain, teams, steps)
    mine = next(number for number, team in enumerate(teams) if rank in team)
    team = half if in_teams else alone
    print(f"max difference {judge(oracles[mine].parameters(), ours.model.parameters(), DRIFT, team):.1e}")


@pytest.mark.mpi(min_size=4)
def test_hierarchical_averager_averages_pairs_and_sometimes_all():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size != 4:
        pytest.skip("pairs of pairs")
    averager = HierarchicalModelAverager(collections.OrderedDict([(2, 2), (4, size)]))
    param = nn.Parameter(torch.zeros(5))
    param.grad = torch.zeros(5)  # without one it is left alone
    for step in range(5):
        param.data = rank + 1 + torch.arange(5.0)
        averager.average_parameters([param])
        wanted = {0: 2.5, 2: 1.5 + rank // 2 * 2}.get(step % 4, rank + 1)
        everyone(torch.equal(param.data, wanted + torch.arange(5.0)), f"step {step}: {param.data}")
