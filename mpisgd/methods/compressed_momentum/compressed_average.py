"""`CompressedAverage`: tensors packed into one for each dtype and device, and averaged by one bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.compress.sign_code import wide_dtype
from mpisgd.core.group import Group
from mpisgd.method_state import Pieces, copied, pieces_of
from mpisgd.methods.two_step.two_step_exchange import Errors, TwoStepExchange

__all__ = ["CompressedAverage"]


class CompressedAverage:
    """Replaces tensors by the 1-bit average of all ranks, time and again; the errors are each rank's own.

    A `Part` of a method's state. Errors are of use to the same rank among as many ones only.
    """

    def __init__(self) -> None:
        self._exchanges: list[TwoStepExchange] = []
        self._loaded: list[Mapping[str, Any]] = []

    def average(self, tensors: Sequence[Tensor], group: Group) -> None:
        """Replace tensors by the average of everyone's. Collective.

        A group of one rank keeps them as they are.
        """
        if group.size == 1:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for place, packed in enumerate(alike.values()):
            lengths = [tensor.numel() for tensor in packed]
            flat = torch.cat([tensor.reshape(-1) for tensor in packed])
            flat = flat.to(wide_dtype(flat.dtype))
            self._exchange_at(place, lengths, flat, group).average(flat)
            for tensor, part in zip(packed, cut_by(flat, lengths), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _exchange_at(self, place: int, lengths: Sequence[int], flat: Tensor, group: Group) -> TwoStepExchange:
        """Return the average of tensors of these lengths, without errors if there were others before."""
        if place < len(self._exchanges) and self._exchanges[place].lengths == tuple(lengths):
            return self._exchanges[place]
        del self._exchanges[place:]
        errors = Errors()
        if place < len(self._loaded) and self._loaded[place]["lengths"] == list(lengths):
            kept = self._loaded[place]
            errors = Errors(**{name: value for name, value in kept.items() if name != "lengths"})
        made = TwoStepExchange(lengths, flat.dtype, flat.device, group, errors)
        self._exchanges.append(made)
        return made

    # -- see `mpisgd.method_state.Part` -------------------------------------------------------------

    def pieces(self) -> Pieces:
        """Return the errors."""
        errors = [
            {"lengths": list(each.lengths), **pieces_of(each.state).own} for each in self._exchanges
        ] or [dict(each) for each in self._loaded]
        return Pieces({}, {"errors": errors} if errors else {})

    def take(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Begin anew with these errors, or without."""
        self._exchanges, self._loaded = [], copied((own or {}).get("errors", []))

    def forget_own(self) -> None:
        """Begin anew without errors."""
        self.take({}, None)
