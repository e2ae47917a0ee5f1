"""`Task`: what the methods of a comparison train, and how good the model becomes."""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.methods.from_text import OptimizerChoice

__all__ = ["Task", "sent_bytes"]


class Task(abc.ABC):
    """A model and its data, the same on all ranks; each trains on its part of a batch.

    A training has `num_parts` parts of equally many steps; after each the common model is evaluated.

    Attributes:
        name: in tables.
        measure: what is evaluated, and the name of the field of a row: "accuracy" or "loss".
        best: the function that returns the best of some, `max` or `min`.
        worst: the other one.
        optimizer: of methods that name none.
        num_parts: see above.
    """

    name: ClassVar[str]
    measure: ClassVar[str]
    best: ClassVar[Any]
    worst: ClassVar[Any]
    optimizer: OptimizerChoice
    num_parts: int

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """Return a new one, with weights by torch's generator."""

    @abc.abstractmethod
    def batches(self, seed: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's inputs and targets of each step of a part."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that is minimised."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Return how good a model is, that all ranks have. Collective."""

    def factor(self, part: int, step: int) -> float:
        """Return the factor of the learning rate in a step of a part, both counted from 0."""
        return 1.0


def sent_bytes() -> float:
    """Return the bytes that all hosts have sent so far, headers and other traffic included. Collective.

    0 where all ranks share a host.
    """
    mine = 0
    if mpisgd.num_nodes() > 1 and mpisgd.local_rank() == 0:
        counters = psutil.net_io_counters(pernic=True)
        mine = sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")
    total = torch.tensor(mine, dtype=torch.float64)
    mpisgd.all_reduce(total)
    return float(total)
