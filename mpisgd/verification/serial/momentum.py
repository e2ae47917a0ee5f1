"""The optimizers that send momentum by one bit per element, by their papers, with all ranks in one process.

b1 and b2 are the decays of momentum m and variance v. Every function returns the parameters after each step,
[steps, numel], or of each rank, [size, steps, numel].
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpisgd.verification.problem import Problem, flat_parameters
from mpisgd.verification.serial.training import gradients, mean_in_order

__all__ = ["one_bit_adam", "one_bit_lamb", "zero_one_adam"]

UNIT = 64  # elements: owners' chunks are a multiple of it
LIMITS = (0.01, 10.0)  # of LAMB's trust ratio
FACTORS, CHANGE = (0.5, 4.0), 0.1  # of 1-bit LAMB's factor, and most change in a step
COEFF_BETA = 0.9


class _Exchange:
    """A 1-bit average with two errors (Tang 2021): ranks send signs to owners of chunks, these to all.

    Signs go with the mean magnitude of a parameter's part in a chunk.
    """

    def __init__(self, lengths: Sequence[int], size: int, order: int) -> None:
        numel = sum(lengths)
        chunk = -(-numel // (size * UNIT)) * UNIT
        ends = torch.tensor(list(lengths)).cumsum(0).tolist()
        cuts = sorted({0, numel, *ends, *range(chunk, numel, chunk)})
        self._pieces = [end - begin for begin, end in itertools.pairwise(cuts)]
        self._left = [torch.zeros(numel, dtype=torch.float64) for _ in range(size)]
        self._owners_left = torch.zeros(numel, dtype=torch.float64)
        self._order = order

    def average(self, ranks: Sequence[Tensor]) -> Tensor:
        sent = []
        for rank, vector in enumerate(ranks):
            meant = vector + self._left[rank].to(vector.dtype)
            sent.append(self._signs(meant))
            self._left[rank] = meant - sent[-1]
        meant = mean_in_order(sent, self._order) + self._owners_left.to(ranks[0].dtype)
        self._owners_left = meant - self._signs(meant)
        return meant - self._owners_left

    def _signs(self, vector: Tensor) -> Tensor:
        return torch.cat(
            [torch.where(part < 0, -1, 1) * part.abs().mean() for part in torch.split(vector, self._pieces)]
        )


class _Ranks:
    """Gradients of the ranks at given parameters."""

    def __init__(self, problem: Problem, order: int) -> None:
        self._problem, self._model, self.order = problem, problem.model(), order
        self.start = flat_parameters(self._model)
        self.lengths = [param.numel() for param in self._model.parameters()]
        self.exchange = _Exchange(self.lengths, problem.size, order)

    def gradient(self, step: int, rank: int, at: Tensor) -> Tensor:
        with torch.no_grad():
            nn.utils.vector_to_parameters(at.clone(), self._model.parameters())
        found = gradients(self._problem, self._model, self._problem.share(step, rank))
        return torch.cat([grad.flatten() for grad in found])

    def gradients(self, step: int, at: Tensor) -> list[Tensor]:
        return [self.gradient(step, rank, at) for rank in range(self._problem.size)]

    def average(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the 1-bit average; of one rank's, itself."""
        return self.exchange.average(vectors) if len(vectors) > 1 else vectors[0]


def one_bit_adam(
    problem: Problem, order: int, *, freeze: int, lr: float, betas: tuple[float, float], eps: float
) -> Tensor:
    """Adam with its bias corrections; after `freeze` steps v is kept, and m exchanged (Tang 2021)."""
    (b1, b2), ranks = betas, _Ranks(problem, order)
    x, m, v, rows = ranks.start, torch.zeros_like(ranks.start), torch.zeros_like(ranks.start), []
    for step in range(1, problem.steps + 1):
        grads = ranks.gradients(step - 1, x)
        if step <= freeze:
            mean = mean_in_order(grads, order)
            m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean**2
        else:
            m = ranks.average([b1 * m + (1 - b1) * grad for grad in grads])
        corrected = v / (1 - b2 ** min(step, freeze))
        x = x - lr * m / (1 - b1**step) / (corrected.sqrt() + eps)
        rows.append(x)
    return torch.stack(rows)


def zero_one_adam(
    problem: Problem,
    order: int,
    *,
    renewals: set[int],
    meetings: set[int],
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """Adam that renews v in some steps, and of which the ranks meet in some of the others (Lu 2022).

    Args:
        problem: what is trained.
        order: of additions.
        renewals: steps, from 1, with the mean gradient.
        meetings: steps, from 1, with the 1-bit average of what the ranks have done since the last one.
        lr: the learning rate.
        betas: b1, b2.
        eps: added to the denominator.
    """
    (b1, b2), ranks, size = betas, _Ranks(problem, order), problem.size
    zero = torch.zeros_like(ranks.start)
    x, m, moved = [ranks.start] * size, [zero] * size, [zero] * size
    met, v, divisor, renewed, rates = ranks.start, zero, zero, 0, 0.0
    rows = []
    for step in range(1, problem.steps + 1):
        grads = [ranks.gradient(step - 1, rank, x[rank]) for rank in range(size)]
        rate = lr / (1 - b1**step)
        if step in renewals:
            mean, renewed = mean_in_order(grads, order), renewed + 1
            v = b2 * v + (1 - b2) * mean**2
            divisor = (v / (1 - b2**renewed)).sqrt() + eps
            m = [b1 * m[0] + (1 - b1) * mean] * size
            met = x[0] - rate * m[0] / divisor
            x = [met] * size
        else:
            m = [b1 * mine + (1 - b1) * grad for mine, grad in zip(m, grads, strict=True)]
            moved = [done + rate * mine for done, mine in zip(moved, m, strict=True)]
            x, rates = [at - rate * mine / divisor for at, mine in zip(x, m, strict=True)], rates + rate
            if step in meetings:
                joined = ranks.average(moved)
                met = met - joined / divisor
                x, m, moved, rates = [met] * size, [joined / rates] * size, [zero] * size, 0.0
        rows.append(torch.stack(x))
    return torch.stack(rows, dim=1)


def one_bit_lamb(
    problem: Problem, order: int, *, freeze: int, lr: float, betas: tuple[float, float], eps: float
) -> Tensor:
    """LAMB; after `freeze` steps v and trust ratios are kept, m exchanged, factors foretold (Li 2021)."""
    ranks = _Ranks(problem, order)
    layers = [_Layer(x, betas, eps) for x in torch.split(ranks.start, ranks.lengths)]
    rows = []
    for step in range(1, problem.steps + 1):
        x = torch.cat([layer.x for layer in layers])
        m = torch.cat([layer.m for layer in layers])
        grads = ranks.gradients(step - 1, x)
        if step <= freeze:
            parts = torch.split(mean_in_order(grads, order), ranks.lengths)
            for layer, grad in zip(layers, parts, strict=True):
                layer.step(grad, lr)
        else:
            joined = ranks.average([betas[0] * m + (1 - betas[0]) * grad for grad in grads])
            for layer, momentum in zip(layers, torch.split(joined, ranks.lengths), strict=True):
                layer.frozen_step(momentum, lr)
        rows.append(torch.cat([layer.x for layer in layers]))
    return torch.stack(rows)


class _Layer:
    """A parameter in 1-bit LAMB, without weight decay."""

    def __init__(self, x: Tensor, betas: tuple[float, float], eps: float) -> None:
        self.x, self.m, self._v = x, torch.zeros_like(x), torch.zeros_like(x)
        self._fresh, self._coeff, self._factor = self._v, 0.0, 1.0
        self._betas, self._eps = betas, eps

    def step(self, grad: Tensor, lr: float) -> None:
        (b1, b2), is_first = self._betas, not self._v.any()
        self.m, self._v = b1 * self.m + (1 - b1) * grad, b2 * self._v + (1 - b2) * grad**2
        self._fresh = self._v
        update = self.m / (self._v.sqrt() + self._eps)
        trust = min(max(float(self.x.norm() / update.norm()), LIMITS[0]), LIMITS[1])
        self._coeff = trust if is_first else COEFF_BETA * self._coeff + (1 - COEFF_BETA) * trust
        self.x = self.x - lr * trust * update

    def frozen_step(self, momentum: Tensor, lr: float) -> None:
        b1, b2 = self._betas
        grad = (momentum - b1 * self.m) / (1 - b1)
        self.m, self._fresh = momentum, b2 * self._fresh + (1 - b2) * grad**2
        ratio = float(((self._v.sqrt() + self._eps) / (self._fresh.sqrt() + self._eps)).max())
        least, most = self._factor * (1 - CHANGE), self._factor * (1 + CHANGE)
        self._factor = min(max(min(max(ratio, FACTORS[0]), FACTORS[1]), least), most)
        self.x = self.x - lr * self._coeff * self._factor * momentum / (self._v.sqrt() + self._eps)
