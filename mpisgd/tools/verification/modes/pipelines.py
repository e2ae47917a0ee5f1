"""`mpisgd.pipeline`: flushing schedules equal one process; the others use gradients of older weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.pipeline import Pipeline
from mpisgd.tools.verification.mode import JOINED, Mode, between_orders
from mpisgd.tools.verification.modes.synchronous import equal_to_one_process, sgd
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients
from mpisgd.tools.verification.problem import Batch, Problem, flat_parameters
from mpisgd.tools.verification.trainer import Trainer

__all__ = ["PIPELINES"]

MICRO_BATCHES = 3


def pipelined(schedule: str) -> Callable[[Trainer], Tensor]:
    """Return the training by a schedule, a stage on each rank; all ranks have the joined batch.

    Without communication each rank trains all stages, on its own share. Where a schedule does not flush,
    only the parameters at the end are compared.
    """

    def train(trainer: Trainer) -> Tensor:
        problem, group = trainer.problem, trainer.group()
        model = problem.model()
        assert isinstance(model, nn.Sequential)
        pipeline = Pipeline(
            model,
            schedule=schedule,
            num_micro_batches=MICRO_BATCHES,
            loss=lambda out, target: trainer.loss(lambda _: out, (out, target)),
            optimizer=sgd,
            group=group,
        )
        flushes = pipeline.schedule.flushes
        rows = []
        for step in range(problem.steps):
            inputs, targets = _batch(trainer, step, alone=group is not None)
            pipeline.step(inputs, targets)
            params = [param for stage in pipeline.stages.values() for param in stage.parameters()]
            trainer.end_step(params)
            if flushes:
                rows.append(_of_all_stages(params, group))
        if not flushes:
            pipeline.flush()
            rows.append(_of_all_stages(params, group))
        pipeline.close()
        return torch.stack(rows)

    return train


def _batch(trainer: Trainer, step: int, *, alone: bool) -> Batch:
    ranks = [trainer.rank] if alone else range(trainer.problem.size)
    return [torch.cat(parts) for parts in zip(*(trainer.batch(step, rank) for rank in ranks), strict=True)]


def _of_all_stages(params: list[nn.Parameter], group: mpisgd.Group | None) -> Tensor:
    mine = torch.cat([param.detach().flatten() for param in params])
    if group is not None:
        return mine
    stages: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(stages, mine)
    return torch.cat(stages)


def double_buffered(problem: Problem, order: int) -> Tensor:
    """Train with gradients of weights that are one update old (PipeDream-2BW); [1, numel], at the end."""
    model, older = problem.model(), problem.model()
    params, at = dict(model.named_parameters()), dict(older.named_parameters())
    run = PaperRun(Definition(Synchronous()), {0: params}, {0: sgd(list(model.parameters()))})
    for batch in problem.batches:
        g = gradients(problem.loss(older, batch), at)
        older.load_state_dict(model.state_dict())
        run.step({0: g})
    return flat_parameters(model).unsqueeze(0)


PIPELINES = (
    Mode("mpisgd.pipeline, 1F1B", "pipelines", pipelined("1f1b"), equal_to_one_process(sgd), sizes=(1, 3)),
    Mode(
        "mpisgd.pipeline, GPipe",
        "pipelines",
        pipelined("gpipe"),
        equal_to_one_process(sgd),
        sizes=(1, 3),
        quick=False,
    ),
    Mode(
        "mpisgd.pipeline, PipeDream-2BW",
        "pipelines",
        pipelined("pipedream-2bw"),
        between_orders(double_buffered, JOINED),
        sizes=(2, 3),
    ),
)
