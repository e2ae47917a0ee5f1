"""What a call of attention over a ring takes: see `mpisgd.methods.cost_kit`, and ring_attention.py for why.

n ranks. Each sends keys and values n - 1 times forward, and as often backward, there with their gradients
behind them. While messages are computed with, others come: so each is in memory twice, from three ranks on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mpisgd.methods.cost_kit import CONTEXT, Alloc, Check, Collective, Free, Op

__all__ = ["RingCost"]


@dataclass(frozen=True)
class RingCost:
    """A call of attention.

    Attributes:
        num_ranks: of the ring.
        nbytes: of a rank's keys and values.
        gradient_bytes: of their gradients: at least 32 bits for each element.
    """

    num_ranks: int
    nbytes: float
    gradient_bytes: float

    def forward(self) -> Iterator[Op]:
        """Yield what a rank does."""
        yield from self._around(self.nbytes)

    def backward(self) -> Iterator[Op]:
        """Yield the same of the backward pass."""
        kept = 2 * self.gradient_bytes if self.num_ranks > 1 else 0.0
        yield Alloc("buffers", kept)
        yield from self._around(self.nbytes)
        if self.num_ranks > 1:
            yield Collective(
                "rotate", self.num_ranks * self.gradient_bytes, CONTEXT, num_ranks=self.num_ranks
            )
        yield Free("buffers", kept)

    def _around(self, nbytes: float) -> Iterator[Op]:
        if self.num_ranks == 1:
            return
        copies = min(2, self.num_ranks - 1) * nbytes
        yield Check(CONTEXT)
        yield Alloc("buffers", copies)
        yield Collective("rotate", self.num_ranks * nbytes, CONTEXT, num_ranks=self.num_ranks)
        yield Free("buffers", copies)
