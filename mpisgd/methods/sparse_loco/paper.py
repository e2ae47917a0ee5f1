"""SparseLoCo: ranks step by themselves for H steps, and the largest of what they have changed is averaged.

Sarfi, Therien, Lidin and Belilovsky 2025, "Communication Efficient LLM Pre-training with SparseLoCo",
algorithm 1. C, there Q(Top-k), is that of `ChunkTopK`.

    x_i    <- x_i - u(g_i)                  every step; u: the update of the inner optimizer
    Delta_i = c_i (theta - x_i)             every H steps
    e_i    <- beta e_i + Delta_i
    D_i     = C(e_i);   e_i <- e_i - D_i
    theta  <- theta - alpha mean of D_i;   x_i <- theta

c_i, which is 1 in the paper: p n_i / (n_1 + ... + n_p), where n_i counts examples of rank i of p since the
last mean. A rank alone has no e_i, and D_i is Delta_i.
"""

from dataclasses import dataclass

from mpisgd.methods.compression_kit import of_chunks
from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, everyone, mean, own

__all__ = ["SparseLoCo", "State"]


@dataclass(frozen=True)
class State:
    """What is kept, by the symbols above; n: by parameter, as some may be added later."""

    theta: Vec = alike(default_factory=Vec, begin="copy")
    e: Vecs = own(default_factory=dict, begin="zeros")
    n: dict[int, dict[str, float]] = own(default_factory=dict)


@dataclass(frozen=True)
class SparseLoCo(Paper[State]):
    """A chunk has `chunk` elements; `keep` of them are sent, each by a sign and one of L + 1 magnitudes."""

    keeps = State
    consensus = "theta"
    weighs = True

    H: int
    alpha: float
    beta: float
    keep: int
    chunk: int
    L: int

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        n = {i: {f: s.n.get(i, {}).get(f, 0) + w.weight[i] for f in s.theta} for i in w.ranks}
        if w.step % self.H:
            return State(s.theta, s.e, n), x
        total, p = {f: sum(n[i][f] for i in w.ranks) for f in s.theta}, len(w.ranks)
        c = {i: {f: p * n[i][f] / total[f] for f in s.theta} for i in w.ranks}
        Delta = {i: Vec({f: c[i][f] * (s.theta[f] - x[i][f]) for f in s.theta}) for i in w.ranks}
        e, D = s.e, Delta
        if p > 1:
            e = {i: self.beta * s.e[i] + Delta[i] for i in w.ranks}
            D = {i: e[i].each(lambda v: of_chunks(v, self.keep, self.chunk, self.L)) for i in w.ranks}
            e = {i: e[i] - D[i] for i in w.ranks}
        theta = s.theta - self.alpha * mean(D, w)
        return State(theta, e, {i: dict.fromkeys(s.theta, 0) for i in w.ranks}), everyone(theta, w)
