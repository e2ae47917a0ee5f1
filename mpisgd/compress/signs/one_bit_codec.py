"""`OneBitCodec`: signs and a mean magnitude for each parameter."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd.compress.signs.sign_code import SignCode

__all__ = ["OneBitCodec"]


class OneBitCodec:
    """A codec of `SignCode`.

    Args:
        lengths: of the parameters that have elements.
        dtype: float32 or float64.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self._code = SignCode(lengths, dtype)
        self.nbytes = self._code.nbytes

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the magnitudes and the signs."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=flat.device)
        self._code.encode(flat.clone(), message)
        return message

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the magnitudes with their signs, or subtract them."""
        out.add_(self._code.decode(message), alpha=sign)
