"""DiLoCo without lock-step: learners at their own pace, an outer step with those that have arrived.

Decoupled DiLoCo (arXiv 2604.21428), where the change of a learner that is late is from the outer parameters
from which it began, as in asynchronous local SGD (Liu et al. 2024).

    step, of learner i     x_i <- x_i - u(g_i);   s_i <- s_i + 1;   t_i <- t_i + its examples
    enter, of learner i    d_i = b_i - x_i, of s_i steps and t_i examples;   s_i, t_i <- 0
    outer, of those m      d_m, s_m, t_m: sums of all with which m has entered since the last
                           w_m = t_m^2 / s_m, or 1;   D = sum of w_m d_m / sum of w_m
                           v <- mu v + D;   theta <- theta - lr (D + mu v)       or theta - lr v
    take, of learner i     x_i, b_i <- theta
"""

from dataclasses import dataclass, replace

from mpisgd.methods.paper_kit import Event, Paper, Vec, Vecs, World, alike, mean, own

__all__ = ["DecoupledDiLoCo", "State"]

EXAMPLES = "examples of the step"  # beside the gradients of a step
Entered = dict[int, tuple[Vec, int, float]]  # by i: d_i, s_i, t_i


@dataclass(frozen=True)
class State:
    """What is kept, by the symbols above; `entered` since the last outer step."""

    theta: Vec = alike(default_factory=Vec)
    v: Vec = alike(default_factory=Vec)
    entered: Entered = alike(default_factory=dict)
    b: dict[int, Vec] = own(default_factory=dict)
    s: dict[int, int] = own(default_factory=dict)
    t: dict[int, float] = own(default_factory=dict)


@dataclass(frozen=True)
class DecoupledDiLoCo(Paper[State]):
    """All happens in events; an outer step names whose changes it is of."""

    depends_on = ("diloco",)

    lr: float = 0.7
    mu: float = 0.9
    nesterov: bool = True
    by_examples: bool = True

    def start(self, x: Vecs, w: World) -> State:
        theta = x[w.ranks[0]]
        steps, examples = dict.fromkeys(w.ranks, 0), dict.fromkeys(w.ranks, 0.0)
        return State(theta, theta * 0.0, {}, dict.fromkeys(w.ranks, theta), steps, examples)

    def event(self, s: State, x: Vecs, e: Event, w: World) -> tuple[State, Vecs]:
        i = e.ranks[0]
        if e.what == "step":
            x_i = w.optimizer(i, x[i], e.g.without([EXAMPLES]))
            t_i = s.t[i] + float(e.g[EXAMPLES])
            return replace(s, s={**s.s, i: s.s[i] + 1}, t={**s.t, i: t_i}), {**x, i: x_i}
        if e.what == "enter":
            d_i, s_i, t_i = s.entered.get(i, (x[i] * 0.0, 0, 0.0))
            entered = {**s.entered, i: (d_i + (s.b[i] - x[i]), s_i + s.s[i], t_i + s.t[i])}
            return replace(s, entered=entered, s={**s.s, i: 0}, t={**s.t, i: 0}), x
        if e.what == "outer":
            return self._outer_step(s, e, w), x
        return replace(s, b={**s.b, i: s.theta}), {**x, i: s.theta}

    def _outer_step(self, s: State, e: Event, w: World) -> State:
        learners = sorted(s.entered)
        if e.ranks != tuple(learners):
            raise ValueError(f"an outer step of {e.ranks}, and {learners} have entered")
        d, w_of = {}, {}
        for i in learners:
            d[i], s_i, t_i = s.entered[i]
            w_of[i] = t_i**2 / s_i if self.by_examples else 1.0
        share = {i: len(learners) * w_of[i] / sum(w_of.values()) for i in learners}
        D = mean({i: share[i] * d[i] for i in learners}, w)
        v = self.mu * s.v + D
        theta = s.theta - self.lr * (D + self.mu * v if self.nesterov else v)
        return replace(s, theta=theta, v=v, entered={})
