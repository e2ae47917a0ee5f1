"""What a rank remembers of the gradients that compression has left out: nothing, or a residual.

Error feedback (Seide and others 2014; Karimireddy and others 2019): with a gradient g of this step and a
residual e of the steps before,

    m = g + e          what is meant
    s = C(m)           what is sent
    e = m - s          what is added to the next gradient

so nothing is lost, only late: over the ranks, mean(m) = what arrives + mean(e). With a decay b below 1, of

    m = g + b e

a part is lost: see `Traits.fades`.

A residual is a rank's own. It goes into this rank's state_dict, and it is lost with the rank. A state that
another rank has saved, or a job of another number of ranks, leaves it at zero: see
`mpisgd.gradients.compression_state`. Where something of it is not finite, as after a step that overflowed, it
begins anew at zero. With a GradScaler it is in the units of the scale: the first step after the scale has
doubled (every 2,000 steps by default) adds half of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.compress.compressor import BucketLayout
from mpisgd.method_state import alike, own

__all__ = ["ErrorMemory", "Residual", "Waiting", "fitted", "is_finite", "memory_of"]


def is_finite(flat: Tensor) -> bool:
    """Return whether all elements are finite; one pass, unless their sum overflows."""
    return bool(flat.sum().isfinite()) or bool(flat.isfinite().all())


@dataclass
class Waiting:
    """What a reducer keeps that may leave something out.

    Attributes:
        residual: [layout.numel], what was meant and not sent; None: nothing yet.
        steps: how many buckets there were.
    """

    residual: Tensor | None = own(None)
    steps: int = alike(0)


def fitted(value: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the residual, [numel], in its place; zeros where there is none yet."""
    if value is None or value.shape != (numel,):
        return torch.zeros(numel, dtype=dtype, device=device)
    return value.to(device, dtype)


class ErrorMemory:
    """Keeps nothing: what compression leaves out is lost.

    Attributes:
        keeps: whether anything is kept.
    """

    keeps = False

    def add(self, bucket: Tensor) -> Tensor:
        """Return gradient plus residual, [n]: `bucket` itself, or memory to take the message out of."""
        return bucket

    def take_at(self, indices: Tensor) -> bool:
        """Note that all of these elements was sent; return as `check`."""
        return True

    def check(self) -> bool:
        """Return whether what is kept is finite, after it was changed from outside; else begin anew."""
        return True

    def reset(self) -> None:
        """Begin anew."""


class Residual(ErrorMemory):
    """Keeps what was meant and not sent.

    Args:
        layout: of the bucket.
        state: has the residual.
        decay: how much of it is added to the next gradient.
    """

    keeps = True

    def __init__(self, layout: BucketLayout, state: Waiting, decay: float = 1.0) -> None:
        self._layout, self._state, self._decay = layout, state, decay
        self._state.residual = self.residual  # its memory is there from the beginning

    @property
    def residual(self) -> Tensor:
        """What was meant and not sent, [layout.numel]."""
        kept = fitted(self._state.residual, self._layout.numel, self._layout.dtype, self._layout.device)
        self._state.residual = kept
        return kept

    def add(self, bucket: Tensor) -> Tensor:
        """Return gradient and residual together, in the memory of the residual."""
        kept = self.residual
        if self._decay != 1.0:
            kept.mul_(self._decay)
        return kept.add_(bucket)

    def take_at(self, indices: Tensor) -> bool:
        """Set the residual of these elements to zero; return whether the rest is finite."""
        self.residual.index_fill_(0, indices, 0)
        return self.check()

    def check(self) -> bool:
        """Return whether all is finite; else begin anew."""
        finite = is_finite(self.residual)
        if not finite:
            self.reset()
        return finite

    def reset(self) -> None:
        """Begin anew."""
        self.residual.zero_()


def memory_of(layout: BucketLayout, error_feedback: bool, state: Waiting, decay: float = 1.0) -> ErrorMemory:
    """Return a residual for a bucket, which `state` has, or what keeps nothing."""
    return Residual(layout, state, decay) if error_feedback else ErrorMemory()
