"""`Synchronous`: one model on all ranks, which average their gradients in every step.

N ranks compute what one process computes on the joined batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.strategy.goes_with import GoesWith, no, yes
from mpisgd.methods.strategy.replicated import Replicated
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training, check_elementwise
from mpisgd.methods.synchronous import paper

__all__ = ["Synchronous"]


@dataclass(frozen=True)
class Synchronous(Strategy):
    """All ranks have the same parameters and apply the same gradients in every step. The default."""

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        buffers = no("buffers stay on their rank; use mpisgd.SyncBatchNorm")
        return GoesWith(
            adaptive_sum=yes(),
            reproducible=yes(),
            share_parameters=yes(),
            named_buffers=buffers,
            uneven_data=yes("as one process"),
        )

    def check(self, training: Training) -> None:
        """Raise if `share_parameters` is set and the parameters cannot be shared."""
        super().check(training)
        if training.share_parameters:
            from mpisgd.sharding.shared_parameters import check_shareable  # others need not load it

            check_shareable(training.named)
            check_elementwise(training)

    def synchronizer(self, training: Training) -> Synchronizer:
        """Return the working part, which reduces gradients; with shared parameters, to their owners."""
        if not training.share_parameters:
            return Replicated(training)
        from mpisgd.methods.sharded.synchronizer import ShardedSynchronizer  # others need not load it

        return ShardedSynchronizer(training)

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any]:
        """See `Strategy`."""
        return paper.Synchronous()
