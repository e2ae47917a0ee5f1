"""What the ranks of a pipeline send and keep is what its cost says."""

from __future__ import annotations

import pytest
import torch
from peak_meter import peak_bytes
from torch import nn
from torch.nn.functional import mse_loss
from verdicts import everyone

import mpisgd
from mpisgd.pipeline import Pipeline

ROWS, WIDTH = 256, 128  # of a micro-batch
MESSAGE = ROWS * WIDTH * 4


@pytest.mark.mpi(min_size=2)
def test_losses_of_earlier_micro_batches_keep_no_outputs():
    """torch makes some losses, mse_loss's among them, in memory that is as large as the output."""
    peaks = []
    for num_micro_batches in (4, 16):
        stages = [nn.Linear(WIDTH, WIDTH) for _ in range(mpisgd.size())]
        pipeline = Pipeline(stages, num_micro_batches=num_micro_batches, loss=mse_loss)
        data = torch.ones(num_micro_batches * ROWS, WIDTH)

        def step(pipeline=pipeline, data=data):
            pipeline.step(data, data)

        step()
        peaks.append(peak_bytes(lambda: None, step))
        pipeline.close()
    everyone(abs(peaks[1] - peaks[0]) <= 2 * MESSAGE, f"{peaks}")
