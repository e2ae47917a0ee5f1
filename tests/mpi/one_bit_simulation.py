"""What 1-bit methods compute, of all ranks in one process, from their papers: numpy, none of our code.

A rank's gradient of parameter k in step t is d (x - c), where d depends on the rank and c on all of these.
"""

from __future__ import annotations

import numpy as np
import torch

import mpisgd

SHAPES = ((9, 11), (7,), (1,), (5, 30))  # 257 elements: the last of 4 ranks owns one, of 3 ranks 1
LENGTHS = [int(np.prod(shape)) for shape in SHAPES]
CHUNK_UNIT = 64

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


def off_by(params: list[torch.nn.Parameter], simulated: Arrays) -> float:
    """The largest difference relative to the largest element."""
    errors = [
        np.abs(p.detach().numpy() - x).max() / np.abs(x).max() for p, x in zip(params, simulated, strict=True)
    ]
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


def mean(all_ranks: list[Arrays]) -> Arrays:
    return [sum(theirs) / len(all_ranks) for theirs in zip(*all_ranks, strict=True)]


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def unflat(vector: np.ndarray) -> Arrays:
    ends = np.cumsum(LENGTHS)[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(vector, ends), SHAPES, strict=True)]


def compressed(vector: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Signs times the mean magnitude between two cuts."""
    parts = [np.where(part < 0, -1, 1) * np.abs(part).mean() for part in np.split(vector, cuts) if len(part)]
    return np.concatenate(parts)


class SerialExchange:
    """Tang et al. 2021: workers compress each owner's chunk, owners the mean; both keep what is left out."""

    def __init__(self, size: int, lengths: list[int] = LENGTHS) -> None:
        numel = sum(lengths)
        chunk = -(-numel // (size * CHUNK_UNIT)) * CHUNK_UNIT
        ends = {*np.cumsum(lengths).tolist(), *range(chunk, numel, chunk)} - {numel}
        self.size, self.cuts = size, sorted(ends)
        self.worker = [np.zeros(numel) for _ in range(size)]
        self.server = np.zeros(numel)

    def average(self, vectors: list[np.ndarray]) -> np.ndarray:
        sent = []
        for rank, vector in enumerate(vectors):
            meant = vector + self.worker[rank]
            sent.append(compressed(meant, self.cuts))
            self.worker[rank] = meant - sent[-1]
        meant = sum(sent) / self.size + self.server
        result = compressed(meant, self.cuts)
        self.server = meant - result
        return result
