"""`Method`: a strategy and a compression to compare, written as `LocalSGD(8)` or `Synchronous + bf16`."""

from dataclasses import dataclass
from typing import Any

import torch

import mpisgd
from mpisgd.compress.compressor import Compressor
from mpisgd.strategies.from_text import compressor_from_text, strategy_from_text
from mpisgd.strategies.strategy import Strategy

__all__ = ["DEFAULT_METHODS", "SYNCHRONOUS", "Method", "methods_of"]

SYNCHRONOUS = "Synchronous"
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
    # With the paper's outer momentum of 0.9 and an inner one of 0.9 it oscillates; see docs/strategies.md.
    "DiLoCo(16, outer_options={'lr': 0.5, 'momentum': 0.5, 'nesterov': True})",
    "Gossip('exponential')",
    "ElasticAveraging(every=8)",
)


@dataclass(frozen=True)
class Method:
    """One way of training together.

    Attributes:
        name: as it was written.
        strategy: how the ranks' models relate.
        compression: what travels.
    """

    name: str
    strategy: Strategy
    compression: Compressor

    def distribute(self, optimizer: torch.optim.Optimizer, **options: Any) -> mpisgd.DistributedOptimizer:
        """Wrap an optimizer. Collective."""
        return mpisgd.DistributedOptimizer(
            optimizer, strategy=self.strategy, compression=self.compression, **options
        )


def methods_of(text: str) -> list[Method]:
    """Return the methods of a list with semicolons, such as `Synchronous + TopK(ratio=0.01); LocalSGD(8)`.

    Raises:
        InvalidArgument: one of them is misspelt.
    """
    methods = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        strategy, _, compression = (word.strip() for word in part.partition("+"))
        methods.append(
            Method(part, strategy_from_text(strategy), compressor_from_text(compression or "none"))
        )
    return methods
