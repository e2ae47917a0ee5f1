"""Synchronous SGD: all ranks take the same step, with the gradient of the joined batch.

Dean et al. 2012, "Large Scale Distributed Deep Networks"; Goyal et al. 2017, "Accurate, Large Minibatch SGD",
equation 2.

    g <- (c_1 g_1 + ... + c_p g_p) / p        p ranks; c_i what the examples of rank i count, 1 each
    x <- x - u(g)                             u: the update of the optimizer

With `sums` g is not divided by p. A gradient that some ranks lack counts as zero there.
"""

from dataclasses import dataclass

from mpisgd.methods.paper_kit import Paper, Vec, World, filled, mean, total

__all__ = ["Synchronous"]


@dataclass(frozen=True)
class Synchronous(Paper[None]):
    """Nothing is kept."""

    rounds = False

    sums: bool = False

    def start(self, x: dict[int, Vec], w: World) -> None:
        """See `Paper`."""

    def reduce(self, s: None, g: dict[int, Vec], w: World) -> tuple[None, dict[int, Vec]]:
        """See `Paper`."""
        weighted = {i: g_i if w.weight[i] == 1 else w.weight[i] * g_i for i, g_i in filled(g).items()}
        return None, dict.fromkeys(w.ranks, total(weighted, w) if self.sums else mean(weighted, w))
