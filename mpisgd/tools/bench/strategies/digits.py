"""`Digits`: a small network on scikit-learn's digits, evaluated by its test accuracy after each epoch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.methods.from_text import OptimizerChoice
from mpisgd.tools.bench.strategies.task import Task

__all__ = ["Digits"]

NUM_CLASSES, TEST_SHARE = 10, 0.2
SGD = OptimizerChoice(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})


class Images(NamedTuple):
    """Images [n, 64] from 0 to 1, and labels [n]."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class Digits(Task):
    """1,797 digits of 8 x 8 pixels, shuffled once for all.

    Args:
        num_epochs: of each training.
        batch: images of a step, over all ranks.
        width: of the network's two hidden layers.

    Raises:
        JobError: there is no scikit-learn.
    """

    name, measure, best, worst = "digits", "accuracy", max, min

    def __init__(self, num_epochs: int, batch: int, width: int) -> None:
        self.num_parts, self.optimizer = num_epochs, SGD
        self._batch, self._width = batch, width
        self._images = _load()

    def model(self) -> nn.Module:
        """Return a network of two hidden layers."""
        width = self._width
        hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))

    def batches(self, seed: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's images of each batch of an epoch."""
        images, labels = self._images.train
        generator = torch.Generator().manual_seed(seed * self.num_parts + part)
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(order) - self._batch + 1, self._batch):
            mine = order[start + mpisgd.rank() : start + self._batch : mpisgd.size()]
            yield images[mine], labels[mine]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy."""
        return nn.functional.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the share of the test images that it gets right."""
        images, labels = self._images.test
        return float((model(images).argmax(1) == labels).double().mean())


def _load() -> Images:
    try:
        from sklearn import datasets
    except ImportError as exc:
        raise mpisgd.JobError(
            'bench strategies needs scikit-learn: pip install "mpisgd[demo]"', exit_code=2
        ) from exc
    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(np.asarray(images, np.float32) / 16)[order]
    y = torch.from_numpy(np.asarray(labels, np.int64))[order]
    cut = round(TEST_SHARE * len(y))
    return Images((x[cut:], y[cut:]), (x[:cut], y[:cut]))
