"""Random compressors by their papers, with the draws of the package: the one thing that a paper leaves open.

Of each bucket, which has the last parameter first, a rank draws from the generator SFC64 seeded with the
compressor's seed, the step and the bucket's elements; and with its rank, where ranks draw different numbers.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mpisgd.verification.serial.training import Combine, mean_in_order

__all__ = ["drawn_codes", "drawn_elements", "drawn_powers", "levels_of"]

Code = Callable[[list[float], list[float]], list[float]]  # of a parameter's elements and as many draws
MANTISSA = 2**52  # of a float64


def drawn_elements(ratio: float, order: int) -> Combine:
    """All ranks send the same random elements, and keep the rest (Stich 2018)."""
    residuals: dict[int, Tensor] = {}
    steps = itertools.count()

    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        buckets = [_bucket(grads) for grads in ranks]
        numel = buckets[0].numel()
        drawn = _draw(next(steps), numel).choice(numel, round(ratio * numel), replace=False, shuffle=False)
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[torch.from_numpy(drawn)] = True
        sent = []
        for rank, bucket in enumerate(buckets):
            meant = bucket + residuals.get(rank, 0.0)
            sent.append(torch.where(mask, meant, torch.zeros_like(meant)))
            residuals[rank] = meant - sent[-1]
        return _parameters(mean_in_order(sent, order), ranks[0])

    return combine


def drawn_codes(code: Code, order: int) -> Combine:
    """Each rank sends codes of its elements, each rounded by a uniform number of its own."""

    def encode(grads: list[Tensor], random: np.random.Generator) -> Tensor:
        draws = random.random(sum(grad.numel() for grad in grads)).tolist()
        codes: list[float] = []
        for grad in reversed(grads):
            begin = len(codes)
            codes += code(grad.flatten().tolist(), draws[begin : begin + grad.numel()])
        return torch.tensor(codes, dtype=grads[0].dtype)

    return _by_rank(encode, order)


def levels_of(num_levels: int, segment: float = math.inf) -> Code:
    """Levels of the largest magnitude of each segment (Alistarh 2017; one level: Wen 2017).

    A number between two levels goes to the upper one with the probability of its distance from the lower.
    """

    def code(values: list[float], draws: list[float]) -> list[float]:
        out: list[float] = []
        while len(out) < len(values):
            begin, end = len(out), int(min(len(values), len(out) + segment))
            largest = max(map(abs, values[begin:end])) or 1.0
            for value, draw in zip(values[begin:end], draws[begin:end], strict=True):
                lower = math.floor(value * num_levels / largest)
                goes_up = draw >= 1 - (value * num_levels / largest - lower)
                out.append((lower + goes_up) * largest / num_levels)
        return out

    return code


def drawn_powers(order: int) -> Combine:
    """Each element becomes one of the two powers of two beside it (Horvath 2019)."""

    def encode(grads: list[Tensor], random: np.random.Generator) -> Tensor:
        values = _bucket(grads)
        words = random.integers(0, 2**64, values.numel(), dtype=np.uint64).tolist()
        powers = [
            _power(value, word % MANTISSA / MANTISSA)
            for value, word in zip(values.tolist(), words, strict=True)
        ]
        return torch.tensor(powers, dtype=values.dtype)

    return _by_rank(encode, order)


def _power(value: float, draw: float) -> float:
    fraction, exponent = math.frexp(abs(value))  # the fraction is in [1/2, 1)
    goes_up = 2 * fraction - 1 + draw >= 1
    return math.copysign(2.0 ** (exponent - 1 + goes_up), value) if value else 0.0


def _by_rank(encode: Callable[[list[Tensor], np.random.Generator], Tensor], order: int) -> Combine:
    steps = itertools.count()

    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        step, numel = next(steps), sum(grad.numel() for grad in ranks[0])
        sent = [encode(grads, _draw(step, numel, rank)) for rank, grads in enumerate(ranks)]
        return _parameters(mean_in_order(sent, order), ranks[0])

    return combine


def _draw(*entropy: int) -> np.random.Generator:
    """Return the generator of a step, with the default seed of all compressors."""
    return np.random.Generator(np.random.SFC64([0, *entropy]))


def _bucket(grads: list[Tensor]) -> Tensor:
    """Return the gradients side by side, the last one first."""
    return torch.cat([grad.flatten() for grad in reversed(grads)])


def _parameters(bucket: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return what lies in a bucket, by parameter."""
    parts = torch.split(bucket, [grad.numel() for grad in reversed(like)])
    return [part.view(grad.shape) for part, grad in zip(reversed(parts), like, strict=True)]
