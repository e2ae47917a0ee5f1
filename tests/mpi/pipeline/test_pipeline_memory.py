"""What the ranks of a pipeline keep does not grow with what is done."""

from __future__ import annotations

import pytest
import torch
from peak_meter import peak_bytes
from torch import nn
from torch.nn.functional import mse_loss
from verdicts import everyone

import mpisgd
from mpisgd.pipeline import Pipeline
from mpisgd.pipeline.schedules.named import NAMED_SCHEDULES

ROWS, WIDTH = 2048, 32  # of a micro-batch
MESSAGE, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH**2


class Case:
    """A pipeline of equal linear stages."""

    def __init__(self, schedule, replicas=None) -> None:
        size = mpisgd.size()
        self.sizes = [WEIGHT] * (2 * size if schedule.name == "Interleaved" else size)
        self.schedule, self.replicas = schedule, replicas
        self.num_micro_batches = 4 * size
        self.data = torch.ones(self.num_micro_batches * ROWS, WIDTH)

    def make(self) -> None:
        self.pipeline = Pipeline(
            [lambda: nn.Linear(WIDTH, WIDTH, bias=False) for _ in self.sizes],
            schedule=self.schedule,
            num_micro_batches=self.num_micro_batches,
            loss=mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, foreach=False),
            replicas=self.replicas,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.step(self.data, self.data)


@pytest.mark.mpi(min_size=2)
def test_losses_of_earlier_micro_batches_keep_no_outputs():
    """torch makes some losses, mse_loss's among them, in memory that is as large as the output."""
    peaks = []
    for num_micro_batches in (4, 16):
        case = Case(NAMED_SCHEDULES["1f1b"])
        case.num_micro_batches, case.data = num_micro_batches, torch.ones(num_micro_batches * ROWS, WIDTH)
        case.make()
        case.steps(1)
        peaks.append(peak_bytes(lambda: None, lambda case=case: case.steps(1)))
        case.pipeline.close()
    everyone(abs(peaks[1] - peaks[0]) <= 2 * MESSAGE, f"{peaks}")
