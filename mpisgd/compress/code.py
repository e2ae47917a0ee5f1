"""`Code`: what values become as bytes that travel, and back."""

from typing import Protocol

from torch import Tensor

__all__ = ["Code"]


class Code(Protocol):
    """How the values of a chunk travel; see `SignCode`, which is one.

    Attributes:
        numel: how many values there are.
        nbytes: of a message.
    """

    numel: int
    nbytes: int

    def encode(self, values: Tensor, message: Tensor) -> Tensor:
        """Write what travels to `message`; leave in `values` what does not.

        Returns:
            Numbers of which not all are finite where `values` were not.
        """

    def decode(self, message: Tensor) -> Tensor:
        """Return the values [numel] that a message holds."""
