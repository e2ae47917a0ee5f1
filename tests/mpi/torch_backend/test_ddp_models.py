"""Models of every kind in torch's DistributedDataParallel, and what programs do around it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_harness import (
    DRIFT,
    FEATURES,
    Trainer,
    check_equal,
    judge,
    mlp,
    plain_step,
    sgd,
    small_buckets,
    trainers,
)
from torch import nn
from verdicts import everyone

pytestmark = pytest.mark.mpi(min_size=2)

# -- kinds of gradients -------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5, dtype=torch.float64)
        self.second = nn.Linear(5, 4, dtype=torch.float32)
        self.last = nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x)).float()))
        return self.last(x.bfloat16()).double()


def test_types_of_parameters_may_be_mixed():
    # The 16-bit type decides: gradients of the ranks are rounded to 8 bits before they are added.
    check_equal(model=Mixed, dtype=None, tol=2e-3)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.embedding((10 * x.abs()).long() % 20).sum(1))


def test_sparse_gradients_stay_sparse():
    _, ours = check_equal(model=Words, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    everyone(ours.model.embedding.weight.grad.is_sparse, "the gradient became dense")


# -- more than one model, fewer ranks -----------------------------------------------------------------


def test_two_models_train_in_one_loop():
    gate = partial(small_buckets, static_graph=True)
    pairs = [trainers(), trainers(model=lambda: nn.Linear(FEATURES, 2), wrap=gate)]
    for step in range(3):
        for run in zip(*pairs, strict=True):
            for one in run:
                one.opt.zero_grad()
            first, second = (one.net(one.rows(step)[0]) for one in run)
            targets = run[0].rows(step)[1]
            # One graph over both: their buckets become ready in turn.
            nn.functional.mse_loss(first * second, targets).backward()
            for one in run:
                one.opt.step()
    worst = max(judge(plain.model.parameters(), ours.model.parameters(), DRIFT) for plain, ours in pairs)
    print(f"max difference {worst:.1e}")


def test_halves_of_the_job_train_each_on_its_own():
    ranks = range(dist.get_world_size())
    halves = [list(ranks[start::2]) for start in range(2)]
    mine, _ = dist.new_subgroups_by_enumeration(halves)
    own = dist.get_rank() % 2

    def on_own_data(run: Trainer, step: int) -> None:
        plain_step(run, 2 * step + own)

    check_equal(on_own_data, group=mine)
    dist.destroy_process_group(mine)


# -- what programs do around it -----------------------------------------------------------------------


def test_clipping_sees_the_joined_gradients():
    def clipped(run: Trainer, step: int) -> None:
        run.opt.zero_grad()
        run.loss(step).backward()
        norm = nn.utils.clip_grad_norm_(run.net.parameters(), 0.1)
        everyone(bool(norm > 0.1), "nothing was clipped")
        run.opt.step()

    check_equal(clipped)


def test_gradient_scaler_skips_and_scales_alike():
    scalers = {side: torch.amp.GradScaler("cpu", init_scale=2.0**10) for side in (False, True)}

    def scaled(run: Trainer, step: int) -> None:
        scaler = scalers[run.distributed]
        run.opt.zero_grad()
        # At step 1 the last rank alone overflows: no rank may make that step.
        last = not run.distributed or run.rank == run.size - 1
        factor = float("inf") if step == 1 and last else 1.0
        scaler.scale(run.loss(step) * factor).backward()
        scaler.unscale_(run.opt)
        nn.utils.clip_grad_norm_(run.net.parameters(), 0.5)
        scaler.step(run.opt)
        scaler.update()

    check_equal(scaled)
    scales = [scaler.get_scale() for scaler in scalers.values()]
    everyone(scales == [2.0**9, 2.0**9], f"{scales}")


def test_schedulers_work_as_in_one_process():
    made: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

    def scheduled(run: Trainer, step: int) -> None:
        schedule = made.setdefault(id(run), torch.optim.lr_scheduler.CosineAnnealingLR(run.opt, T_max=4))
        plain_step(run, step)
        schedule.step()

    check_equal(scheduled)


class Own(nn.Module):
    """The compiler leaves out models that are nothing but torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


def test_compiled_ddp_equals_one_process(monkeypatch):
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(model: nn.Module, process_group: Any) -> nn.Module:
        return torch.compile(small_buckets(model, process_group=process_group), backend=backend)

    # The compiler cuts the graph where the buckets end; the first one must not be larger than the others.
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
    check_equal(model=Own, wrap=compiled)
    everyone(len(graphs) > 1, f"{len(graphs)} graph(s)")


def test_state_dict_of_ddp_loads_into_the_plain_model():
    _, ours = trainers(optimizer=sgd)
    plain_step(ours, 0)
    state = {name.removeprefix("module."): value for name, value in ours.net.state_dict().items()}
    fresh = mlp().double()
    fresh.load_state_dict(state)
    judge(fresh.parameters(), ours.model.parameters(), 0.0)
