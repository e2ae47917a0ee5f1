"""`seed`: random numbers that differ by rank, or are equal on all, and repeat from run to run."""

import random
from typing import Any

import numpy as np
import torch

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument
from mpisgd.job.rank_info import rank

__all__ = ["seed"]


def seed(value: int, *, same: bool = False) -> int:
    """Seed Python's `random`, numpy and torch (all devices) on this rank; return the seed that torch got.

    Each rank draws different numbers, as dropout and augmentation need it. Workers of a DataLoader, whose
    seeds torch derives from its own, differ by rank, too. With `same=True` all ranks draw the same numbers,
    for example for a model that each rank makes by itself.

    Args:
        value: 0 or more; the same on all ranks.
        same: whether all ranks get the same seed.

    Raises:
        InvalidArgument: `value` is not an integer of 0 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"seed: value={shown(value)}; expected an integer, 0 or more")
    # Seeds of neighbouring ranks must not be neighbours: workers of a DataLoader count theirs on from them.
    sequence: Any = np.random.SeedSequence([value, 0 if same else 1 + rank()])
    of_python, of_numpy, *of_torch = (int(word) for word in sequence.generate_state(4))
    random.seed(of_python)
    np.random.seed(of_numpy)
    drawn = of_torch[0] | (of_torch[1] & 0x7FFFFFFF) << 32  # a signed number of 64 bits
    torch.manual_seed(drawn)
    return drawn
