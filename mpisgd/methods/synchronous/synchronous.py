"""`Synchronous`: one model on all ranks, which average their gradients in every step.

N ranks compute what one process computes on the joined batch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mpisgd.errors import InvalidArgument
from mpisgd.methods.sharded.shared import Shared
from mpisgd.methods.strategy.replicated import Replicated
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.shared_parameters import check_shareable

__all__ = ["Synchronous"]


@dataclass(frozen=True)
class Synchronous(Strategy):
    """All ranks have the same parameters and apply the same gradients in every step. The default."""

    excludes: ClassVar[frozenset[str]] = frozenset({"named_buffers"})

    def check(self, training: Training) -> None:
        """Raise where the parameters cannot be shared, or updated apart, if they are to be."""
        super().check(training)
        if not training.share_parameters:
            return
        if isinstance(training.optimizer, torch.optim.LBFGS):
            raise InvalidArgument(
                "share_parameters: LBFGS computes its direction from all gradients together, and with shared "
                "parameters each rank has those of its own only"
            )
        check_shareable(training.named)

    def synchronizer(self, training: Training) -> Synchronizer:
        """Return what reduces gradients; with shared parameters, to the ranks that own them."""
        return (Shared if training.share_parameters else Replicated)(training)
