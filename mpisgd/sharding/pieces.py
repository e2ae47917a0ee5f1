"""`Pieces`: what a rank updates, wherever it lies: in memory, on a device, or in files."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from mpisgd.gradients.fusion_buffer import Layout
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.piece import Piece

__all__ = ["Pieces", "Receiver"]


class Receiver(Protocol):
    """Takes combined gradients.

    Attributes:
        in_place: whether `room_for` may be the memory in which the gradient of this rank lies.
    """

    in_place: bool

    def room_for(self, piece: Piece, mine: Tensor | None) -> Tensor:
        """Return [numel] for the gradient of a piece; `mine` is this rank's, if it lies in one piece."""

    def received(self, piece: Piece, grad: Tensor) -> None:
        """Take the gradient of a piece, which is complete."""

    def finish(self) -> None:
        """Note that there are no more, or that those before are about to leave the memory."""


class Pieces(Protocol):
    """The pieces of a rank.

    Attributes:
        owners: the ranks that have them all.
        pieces: of this rank.
        layouts: how each parameter lies in memory.
    """

    owners: Owners
    pieces: list[Piece]
    layouts: list[Layout]

    def placed(self, piece: Piece, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a piece with its tensors where the optimizer would have put them."""

    def hand_over(self, receiver: Receiver) -> None:
        """Give all pieces that have a gradient, one after the other; each is in memory until `finish`."""
