"""`Codec`: what one rank has, as bytes and back; pure, it keeps nothing from one call to the next."""

from typing import Protocol

import numpy as np
from torch import Tensor

__all__ = ["Codec"]


class Codec(Protocol):
    """Numbers as bytes, equally many on all ranks.

    Attributes:
        nbytes: of what a bucket becomes.
    """

    nbytes: int

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return [nbytes] uint8 that stand for about `flat` [n], which is unchanged."""

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add what a message stands for to `out` [n], or subtract it where `sign` is -1."""
