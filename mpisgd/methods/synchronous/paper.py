"""Synchronous SGD: all ranks take the same step, with the gradient of the joined batch.

Dean et al. 2012, "Large Scale Distributed Deep Networks"; Goyal et al. 2017, "Accurate, Large Minibatch SGD",
equation 2.

    g <- (c_1 g_1 + ... + c_p g_p) / p        p ranks; c_i = p n_i / (n_1 + ... + n_p), n_i examples of rank i
    x <- x - u(g)                             u: the update of the optimizer

With `sums` g is g_1 + ... + g_p. A gradient that some ranks lack counts as zero there.
"""

from dataclasses import dataclass

from mpisgd.methods.paper_kit import Paper, Vecs, World, filled, mean, total, weighted

__all__ = ["Synchronous"]


@dataclass(frozen=True)
class Synchronous(Paper[None]):
    """Nothing is kept."""

    rounds = False
    weighs = True

    sums: bool = False

    def reduce(self, s: None, g: Vecs, w: World) -> tuple[None, Vecs]:
        g = filled(g)
        return None, dict.fromkeys(w.ranks, total(g, w) if self.sums else mean(weighted(g, w.weight), w))
