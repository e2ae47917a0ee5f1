"""1-bit Adam: Adam for T steps, then its momentum by one bit per element, with the variance as it was.

Tang et al. 2021, "1-bit Adam", algorithm 1. The bias corrections are those of Adam (Kingma and Ba 2015),
which the algorithm leaves out; that of v stays what it was at step T.

    t <= T:   g = mean of g_i;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    t > T:    m <- average of b1 m + (1 - b1) g_i           by `w.wire`: the 1-bit average with two errors
              x <- (1 - lr decay) x - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^min(t, T))) + eps)

lr is a function of t; decay is AdamW's (Loshchilov and Hutter 2019). Where v is 0 m is 0 after T: there was
no gradient, and what comes is noise of the compression.
"""

from mpisgd.methods.compression_kit import CompressedMomentum, Moments, root
from mpisgd.methods.paper_kit import Vecs, World

__all__ = ["OneBitAdam"]


class OneBitAdam(CompressedMomentum[Moments]):
    """See above."""

    def update(self, s: Moments, x: Vecs, g: Vecs, w: World) -> tuple[Moments, Vecs]:
        s, t = self.moments(s, g, w), w.step
        corrected = s.v / (1 - self.b2 ** min(t, self.T))
        step = s.m / root(corrected, self.eps) * (self.lr(t) / (1 - self.b1**t))
        return s, {i: (1 - self.lr(t) * self.decay) * x[i].only(step) - step for i in w.ranks}
