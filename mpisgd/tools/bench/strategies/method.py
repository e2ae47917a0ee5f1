"""`Method`: what to compare: `LocalSGD(8)`, `Synchronous + bf16` or `DiLoCo(20) with AdamW(lr=0.003)`.

    METHODS = METHOD; METHOD; ...
    METHOD = STRATEGY [+ COMPRESSION] [with OPTIMIZER]

An optimizer that communicates is a method by itself: `Synchronous with OneBitAdam(freeze_step=50)`.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import mpisgd
from mpisgd.arguments import shown
from mpisgd.compress.compressor import Compressor, has_momentum
from mpisgd.errors import InvalidArgument
from mpisgd.methods.from_text import (
    OptimizerChoice,
    compressor_from_text,
    optimizer_from_text,
    strategy_from_text,
)
from mpisgd.methods.strategy.goes_with import averages_by_itself
from mpisgd.methods.strategy.strategy import Strategy

__all__ = ["DEFAULT_METHODS", "SYNCHRONOUS", "Method", "common_model", "finish", "methods_of"]

SYNCHRONOUS = "Synchronous"
AS_THEY_ARE = (mpisgd.Synchronous(), mpisgd.Sharded(1), mpisgd.Sharded(2))
DEFAULT_METHODS = (
    SYNCHRONOUS,
    "Synchronous + auto",
    "Synchronous + bf16",
    "Synchronous + TopK(ratio=0.01)",
    "Synchronous + DeepGradient(ratio=0.01)",
    "Synchronous + PowerSGD(rank=2)",
    "Synchronous + OneBit()",
    "Synchronous + QSGD(bits=4)",
    "LocalSGD(8)",
    # With the paper's outer momentum of 0.9 and an inner one of 0.9 it oscillates (concepts/strategies.md).
    "DiLoCo(16, outer_options={'lr': 0.5, 'momentum': 0.5, 'nesterov': True})",
    "Gossip('exponential')",
    "ElasticAveraging(every=8)",
)


@dataclass(frozen=True)
class Method:
    """One way of training together.

    Attributes:
        name: as it was written.
        strategy: what the ranks exchange, and how often.
        compression: what travels.
        optimizer: of every rank; None: that of the comparison.
    """

    name: str
    strategy: Strategy
    compression: Compressor
    optimizer: OptimizerChoice | None = None

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks average their gradients in every step, as they are."""
        own = self.optimizer is not None and averages_by_itself(self.optimizer.kind)
        return self.strategy in AS_THEY_ARE and not own and self.compression == mpisgd.Compression.none

    def chosen(self, default: OptimizerChoice) -> OptimizerChoice:
        """Return the optimizer to train with; the default one without a momentum that compression has."""
        if self.optimizer is not None or not has_momentum(self.compression):
            return self.optimizer or default
        without = {name: value for name, value in default.options.items() if name != "momentum"}
        return OptimizerChoice(default.kind, without)

    def distribute(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Wrap an optimizer, unless it averages by itself. Collective.

        Raises:
            InvalidArgument: on every rank, for what does not go together.
        """
        if averages_by_itself(optimizer) and self.compression == mpisgd.Compression.none:
            return optimizer
        return mpisgd.DistributedOptimizer(
            optimizer, strategy=self.strategy, compression=self.compression, **options
        )


def methods_of(text: str) -> list[Method]:
    """Return the methods of a list with semicolons, such as `Synchronous + TopK(ratio=0.01); LocalSGD(8)`.

    Raises:
        InvalidArgument: one of them is misspelt.
    """
    return list(_methods(filter(None, (part.strip() for part in text.split(";")))))


def _methods(parts: Iterable[str]) -> Iterator[Method]:
    for part in parts:
        together, _, optimizer = (word.strip() for word in part.partition(" with "))
        strategy, plus, compression = (word.strip() for word in together.partition("+"))
        if plus and not compression:
            raise InvalidArgument(f"method {shown(part)}: expected a compression behind the +")
        yield Method(
            part,
            strategy_from_text(strategy),
            compressor_from_text(compression or "none"),
            optimizer_from_text(optimizer) if optimizer else None,
        )


def common_model(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Inside, the model is the consensus of all ranks. Collective."""
    if isinstance(optimizer, mpisgd.DistributedOptimizer):
        return optimizer.consensus()
    return nullcontext()


def finish(optimizer: torch.optim.Optimizer) -> None:
    """Wait for the last updates of others, where ranks train at a pace of their own. Collective."""
    if isinstance(optimizer, mpisgd.DistributedOptimizer):
        optimizer.synchronizer.finish()
