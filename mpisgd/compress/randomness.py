"""Random numbers of compressors: other ones in every step, and the same ones in a run that is repeated."""

import numpy as np
import torch
from torch import Tensor

__all__ = ["generator", "uniform"]


def generator(seed: int, step: int, numel: int, rank: int | None = None) -> np.random.Generator:
    """Return the generator of one step of one bucket.

    Args:
        seed: of the compressor.
        step: of the bucket's reducer.
        numel: of the bucket.
        rank: in the group; None: the same numbers on all ranks.
    """
    entropy = [seed % 2**64, step, numel] if rank is None else [seed % 2**64, step, numel, rank]
    return np.random.Generator(np.random.SFC64(entropy))


def uniform(like: Tensor, random: np.random.Generator) -> Tensor:
    """Return numbers in [0, 1) of the shape and dtype of `like`, float32 or float64, and where it is."""
    kind = np.float32 if like.dtype is torch.float32 else np.float64
    return torch.from_numpy(random.random(like.shape, dtype=kind)).to(like.device)
