"""The compressors by their papers: what each makes of the gradients of all ranks, in one process.

A function here returns a `Combine`, which keeps what the method keeps from step to step.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd.verification.serial.training import Combine, mean_in_order

__all__ = [
    "adaptive_sum",
    "adasum",
    "cast",
    "deep_gradient",
    "error_feedback",
    "largest",
    "per_host",
    "power_sgd",
    "sign_and_mean",
    "votes",
]

Send = Callable[[Tensor], Tensor]  # what of a rank's tensor of one parameter arrives


def cast(dtype: torch.dtype, order: int) -> Combine:
    """Each rank's gradient is rounded, the sum is exact, the mean is rounded."""

    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        rounded = [[grad.to(dtype).float() for grad in grads] for grads in ranks]
        means = [mean_in_order(parts, order) for parts in zip(*rounded, strict=True)]
        return [mean.to(dtype).to(ranks[0][0].dtype) for mean in means]

    return combine


def adasum(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Each parameter's gradients are combined by `adaptive_sum`."""
    return [adaptive_sum(grads) for grads in zip(*ranks, strict=True)]


def adaptive_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, pair by pair, until one is left (Maleki 2020)."""
    if len(tensors) == 1:
        return tensors[0]
    pairs = [tensors[place : place + 2] for place in range(0, len(tensors), 2)]
    return adaptive_sum([_combined(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


def _combined(a: Tensor, b: Tensor) -> Tensor:
    product = (a.double() * b.double()).sum()
    squares = [part.double().square().sum() for part in (a, b)]
    shares = [1 - product / (2 * square) if square else 1.0 for square in squares]  # 0: the other alone
    return (shares[0] * a + shares[1] * b).to(a.dtype)


def error_feedback(send: Send, order: int) -> Combine:
    """Each rank sends a part of gradient and residual, and keeps the rest (Karimireddy 2019)."""
    residuals: dict[tuple[int, int], Tensor] = {}

    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        means = []
        for which in range(len(ranks[0])):
            sent = []
            for rank, grads in enumerate(ranks):
                meant = grads[which] + residuals.get((rank, which), 0.0)
                sent.append(send(meant))
                residuals[rank, which] = meant - sent[-1]
            means.append(mean_in_order(sent, order))
        return means

    return combine


def per_host(hosts: Sequence[Sequence[int]], combine: Combine, order: int) -> Combine:
    """Each host's mean, times its share of the ranks, is what one rank of it compresses."""

    def combined(ranks: list[list[Tensor]]) -> list[Tensor]:
        means = []
        for members in hosts:
            weight = len(members) * len(hosts) / len(ranks)
            parts = zip(*(ranks[rank] for rank in members), strict=True)
            means.append([weight * mean_in_order(grads, order) for grads in parts])
        return combine(means)

    return combined


def largest(ratio: float) -> Send:
    """Send the largest elements."""

    def send(meant: Tensor) -> Tensor:
        count = max(1, round(ratio * meant.numel()))
        kept = sorted(range(meant.numel()), key=lambda i: -abs(meant.flatten()[i].item()))[:count]
        mask = torch.zeros(meant.numel(), dtype=torch.bool)
        mask[kept] = True
        return torch.where(mask.view(meant.shape), meant, torch.zeros_like(meant))

    return send


def sign_and_mean(meant: Tensor) -> Tensor:
    """Send signs, and the mean magnitude."""
    return torch.where(meant >= 0, 1.0, -1.0).to(meant.dtype) * meant.abs().mean()


def votes(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return the sign of the sum of signs (Bernstein 2018)."""
    return [torch.stack(parts).sign().sum(0).sign() for parts in zip(*ranks, strict=True)]


def deep_gradient(ratio: float, momentum: float, order: int) -> Combine:
    """Top-k of accumulated velocities, with momentum correction and factor masking (Lin 2018)."""
    velocity: dict[tuple[int, int], Tensor] = {}
    waiting: dict[tuple[int, int], Tensor] = {}
    send = largest(ratio)

    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        means = []
        for which in range(len(ranks[0])):
            sent = []
            for rank, grads in enumerate(ranks):
                key = (rank, which)
                u = momentum * velocity.get(key, torch.zeros_like(grads[which])) + grads[which]
                v = waiting.get(key, torch.zeros_like(u)) + u
                sent.append(send(v))
                velocity[key] = torch.where(sent[-1] != 0, 0.0, u).to(u.dtype)
                waiting[key] = torch.where(sent[-1] != 0, 0.0, v).to(v.dtype)
            means.append(mean_in_order(sent, order))
        return means

    return combine


def power_sgd(rank: int, order: int) -> Combine:
    """One power iteration from the last step's factor, with error feedback (Vogels 2019).

    The first factor is the one piece of the package's that the definition leaves open: normal numbers of
    seed 0, by step, and by elements of the matrix.
    """
    factors: dict[int, Tensor] = {}
    residuals: dict[tuple[int, int], Tensor] = {}

    def of_matrix(which: int, parts: list[Tensor]) -> Tensor:
        rows, columns = parts[0].shape
        if which not in factors:
            draw = np.random.Generator(np.random.SFC64([0, 0, rows * columns]))
            factors[which] = torch.from_numpy(draw.standard_normal((columns, rank))).to(parts[0].dtype)
        meant = [part + residuals.get((place, which), 0.0) for place, part in enumerate(parts)]
        basis = _orthonormal(mean_in_order([each @ factors[which] for each in meant], order))
        factors[which] = mean_in_order([each.T @ basis for each in meant], order)
        found = basis @ factors[which].T
        for place, each in enumerate(meant):
            residuals[place, which] = each - found
        return found

    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        found = []
        for which, parts in enumerate(map(list, zip(*ranks, strict=True))):
            shape = parts[0].shape
            pays = len(shape) == 2 and math.prod(shape) > rank * sum(shape)
            found.append(of_matrix(which, parts) if pays else mean_in_order(parts, order))
        return found

    return combine


def _orthonormal(matrix: Tensor) -> Tensor:
    """Gram and Schmidt, twice over."""
    columns: list[Tensor] = []
    for column in matrix.T.clone():
        rest = column
        for other in columns * 2:
            rest = rest - (other @ rest) * other
        columns.append(rest / rest.norm())
    return torch.stack(columns, dim=1)
