"""`--strategy` and `--compression` of the training programs: how the ranks train together.

    --strategy "LocalSGD(8)"                   every rank trains by itself, and every 8 steps they average
    --compression "TopK(ratio=0.01)"           gradients, or changes of the model, travel as something smaller

docs/concepts/strategies.md says which one when. Without either option all ranks average their gradients
in every step.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from torch import nn
from torch.optim import Optimizer

import mpisgd
from mpisgd.methods.from_text import compressor_from_text, strategy_from_text

StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy", help="What the ranks exchange and how often, such as LocalSGD(8), DiLoCo(40)."
    ),
]
CompressionOption = Annotated[
    str, typer.Option("--compression", help="Compression of gradients, such as bf16, TopK(ratio=0.01).")
]


@dataclass(frozen=True)
class Method:
    """A strategy with a compression."""

    strategy: mpisgd.Strategy
    compression: mpisgd.Compressor

    @property
    def has_one_model(self) -> bool:
        """Whether all ranks have the same parameters after every step."""
        return isinstance(self.strategy, (mpisgd.Synchronous, mpisgd.Sharded))

    @property
    def is_default(self) -> bool:
        """Whether gradients are averaged as they are."""
        return self.strategy == mpisgd.Synchronous() and self.compression == mpisgd.Compression.none

    def distribute(
        self, optimizer: Optimizer, model: nn.Module, **options: Any
    ) -> mpisgd.DistributedOptimizer:
        """Wrap the optimizer of `model`. Collective."""
        try:
            return mpisgd.DistributedOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                strategy=self.strategy,
                compression=self.compression,
                **options,
            )
        except mpisgd.InvalidArgument as error:  # alike on all ranks
            raise mpisgd.JobError(str(error)) from error


def read_method(strategy: str, compression: str) -> Method:
    """What the two options ask for.

    Raises:
        JobError: one of them is misspelt, or nothing for a program that trains on all ranks.
    """
    try:
        method = Method(strategy_from_text(strategy), compressor_from_text(compression))
    except mpisgd.InvalidArgument as error:
        raise mpisgd.JobError(f"--{error}") from error
    if getattr(method.strategy, "servers", None) is not None:
        raise mpisgd.JobError(f"--strategy {strategy}: this program trains on all ranks; leave out servers=")
    return method


def common_model(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Inside, the model is what those of all ranks stand for, where a strategy lets them differ."""
    if isinstance(optimizer, mpisgd.DistributedOptimizer):
        return optimizer.consensus()
    return nullcontext()


def finish(optimizer: Optimizer) -> None:
    """Wait for the last updates of others, where ranks train at a pace of their own. Collective."""
    if isinstance(optimizer, mpisgd.DistributedOptimizer):
        optimizer.synchronizer.finish()
