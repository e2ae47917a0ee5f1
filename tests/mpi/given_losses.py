"""Parameters and losses of which every rank knows all gradients, in numpy.

A rank's gradient of parameter k in step t is d (x - c), where d depends on the rank and c on all of these.
"""

from __future__ import annotations

import numpy as np
import torch

import mpisgd

SHAPES = ((9, 11), (7,), (1,), (5, 30))  # 257 elements: the last of 4 ranks owns one, of 3 ranks 1
LENGTHS = [int(np.prod(shape)) for shape in SHAPES]

Arrays = list[np.ndarray]


def begin() -> Arrays:
    draw = np.random.default_rng(5)
    return [draw.standard_normal(shape) for shape in SHAPES]


def center(rank: int, step: int, which: int) -> np.ndarray:
    return 10.0**-which * np.random.default_rng([rank, step, which]).standard_normal(SHAPES[which])


def gradients(params: Arrays, rank: int, step: int) -> Arrays:
    return [(1 + 0.1 * rank) * (x - center(rank, step, which)) for which, x in enumerate(params)]


def torch_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in begin()]


def torch_backward(params: list[torch.nn.Parameter], step: int, share: float = 1.0) -> None:
    """Add this rank's gradients, times `share`."""
    rank = mpisgd.rank()
    loss = sum(
        (0.5 * (1 + 0.1 * rank) * (p - torch.from_numpy(center(rank, step, which))) ** 2).sum()
        for which, p in enumerate(params)
    )
    (share * loss).backward()


def off_by(params: list[torch.nn.Parameter], expected: Arrays) -> float:
    """The largest difference relative to the largest element."""
    errors = [
        np.abs(p.detach().numpy() - x).max() / np.abs(x).max() for p, x in zip(params, expected, strict=True)
    ]
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")
