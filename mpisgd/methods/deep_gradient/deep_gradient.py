"""`DeepGradient`: the largest elements travel, and momentum is part of what waits.

Lin, Han, Mao, Wang and Dally 2018, "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.arguments import check_count, check_flag, check_positive, check_ratio, shown
from mpisgd.compress.compressor import BucketLayout, HasMomentum, Traits
from mpisgd.compress.residual import Residual, Waiting, fitted
from mpisgd.compress.selection import count_of, top_k_of_each
from mpisgd.compress.sparse_reducer import SparseReducer
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.method_state import own
from mpisgd.methods.coding import Coding
from mpisgd.methods.deep_gradient import paper
from mpisgd.methods.paper_kit import Paper

__all__ = ["DeepGradient", "DeepGradientReducer", "MomentumCorrection", "clip_each_"]


@dataclass(frozen=True)
class DeepGradient(WideCompressor, HasMomentum):
    """Deep gradient compression: top-k with momentum correction, factor masking, clipping and warm-up.

    The compressor has the momentum, so wrap `torch.optim.SGD(momentum=0)`. An optimizer with a momentum of
    its own, and strategies that average parameters, raise an error.

        g_i = g_i min(1, c / (sqrt(N) |g_i|))  local clipping of each parameter's gradient, if asked for
        u_i = beta u_i + g_i                   velocity of rank i (momentum correction)
        v_i = v_i + u_i                        what waits; with Nesterov v_i + g_i + beta u_i
        s_i = v_i where |v_i| is among the k largest of a parameter, else 0
        v_i = v_i - s_i
        u_i = 0 where something was sent       (momentum factor masking)
        g   = mean of s_i over the N ranks     (or the sum, with op=SUM)

    With ratio=1 everything is sent and the velocity is always 0, so that training is SGD without momentum.
    The same holds in a group of one rank, which sends nothing.

    Attributes:
        ratio: k / n, above 0 and up to 1; at least one element of each parameter travels.
        momentum: beta, 0 up to 1.
        nesterov: Nesterov momentum.
        warmup_steps: number of steps in which the ratio falls exponentially from `warmup_ratio` to `ratio`.
            In the paper these are four epochs: 25 %, 6.25 %, 1.56 % and 0.4 %, then 0.1 %.
        warmup_ratio: the ratio of the first step, above 0 and up to 1.
        clip_norm: c, the largest norm of the sum of the ranks' gradients of a parameter; None: no clipping.

    Raises:
        InvalidArgument: at construction.

    Cost: sends as `TopK`. Keeps two tensors the size of the gradients, this rank's own: see
        `mpisgd.compress.residual`.
    """

    ratio: float
    momentum: float = 0.9
    nesterov: bool = False
    warmup_steps: int = 0
    warmup_ratio: float = 0.25
    clip_norm: float | None = None

    @classmethod
    def examples(cls) -> Sequence["DeepGradient"]:
        """See `Compressor`."""
        careful = cls(ratio=0.3, momentum=0.5, warmup_steps=2, warmup_ratio=0.6, clip_norm=2.0)
        return (cls(ratio=0.5), careful, cls(ratio=0.3, momentum=0.5, nesterov=True))

    def __post_init__(self) -> None:
        check_ratio("DeepGradient", "ratio", self.ratio)
        check_ratio("DeepGradient", "warmup_ratio", self.warmup_ratio)
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, (int, float)):
            raise InvalidArgument(f"DeepGradient: momentum={shown(self.momentum)}; expected a number")
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"DeepGradient: momentum={self.momentum}; expected 0 or more, below 1")
        check_flag("DeepGradient", "nesterov", self.nesterov)
        check_count("DeepGradient", "warmup_steps", self.warmup_steps)
        if self.clip_norm is not None:
            check_positive("DeepGradient", "clip_norm", self.clip_norm)

    @cached_property
    def traits(self) -> Traits:
        """Not additive, since the velocity applies a gradient again later; clipping is not homogeneous."""
        return Traits(is_additive=self.momentum == 0, is_homogeneous=self.clip_norm is None)

    def ratio_at(self, step: int) -> float:
        """Return the ratio of a step, counted from 0."""
        if step >= self.warmup_steps or self.ratio >= self.warmup_ratio:
            return self.ratio
        return float(self.warmup_ratio * (self.ratio / self.warmup_ratio) ** (step / self.warmup_steps))

    def wide_reducer(self, layout: BucketLayout) -> "DeepGradientReducer":
        """Return the reducer, which corrects, selects and sends elements of a bucket."""
        return DeepGradientReducer(layout, self)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`. It sends as `TopK`."""
        return Coding(element_s=20e-9, copies=0.0, of_largest=1.25)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.DeepGradient(
            self.ratio,
            self.momentum,
            self.nesterov,
            self.warmup_steps,
            self.warmup_ratio,
            math.inf if self.clip_norm is None else self.clip_norm,
        )


def clip_each_(bucket: Tensor, numels: Sequence[int], max_norm: float) -> None:
    """Scale each part of `bucket` such that its norm is at most `max_norm`."""
    parts = cut_by(bucket, numels)
    norms = torch.stack(torch._foreach_norm(parts))
    torch._foreach_mul_(parts, list((max_norm / norms).clamp(max=1)))  # 1 where a norm is 0


@dataclass
class Corrected(Waiting):
    """What is kept.

    Attributes:
        velocity: [layout.numel], u of the paper; None: zero.
    """

    velocity: Tensor | None = own(None)


class MomentumCorrection(Residual):
    """Accumulates a velocity, and what of it waits to be sent.

    The residual is v of the paper.
    """

    def __init__(self, layout: BucketLayout, state: Corrected, momentum: float, nesterov: bool) -> None:
        super().__init__(layout, state)
        self._corrected = state
        self._corrected.velocity = self.velocity
        self._momentum = momentum
        self._nesterov = nesterov

    @property
    def velocity(self) -> Tensor:
        """U of the paper, [layout.numel]."""
        kept = fitted(self._corrected.velocity, self._layout.numel, self._layout.dtype, self._layout.device)
        self._corrected.velocity = kept
        return kept

    def add(self, bucket: Tensor) -> Tensor:
        """Add a gradient to the velocity, and that to what waits; return the latter."""
        self.velocity.mul_(self._momentum).add_(bucket)
        if not self._nesterov:
            return self.residual.add_(self.velocity)
        return self.residual.add_(bucket).add_(self.velocity, alpha=self._momentum)

    def take_at(self, indices: Tensor) -> bool:
        """Set what waits and the velocity to zero at these elements; return whether the rest is finite."""
        self.velocity.index_fill_(0, indices, 0)
        return super().take_at(indices)

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self.velocity.zero_()


class DeepGradientReducer(SparseReducer):
    """The working part of `DeepGradient`."""

    def __init__(self, layout: BucketLayout, choice: DeepGradient) -> None:
        state = Corrected()
        memory = MomentumCorrection(layout, state, choice.momentum, choice.nesterov)
        super().__init__(layout, memory, state)
        self._choice = choice

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Clip what this rank has, then as `SparseReducer.reduce`."""
        if self._choice.clip_norm is not None:
            clip_each_(bucket, self.numels, self._choice.clip_norm * group.size**-0.5)
        super().reduce(bucket, group, op)

    def select(self, meant: Tensor) -> Tensor:
        """Return the indices of the largest elements of each parameter."""
        return top_k_of_each(meant, self.numels, self._choice.ratio_at(self.state.steps))

    def count(self) -> int:
        """Return k of all parameters together, in this step."""
        ratio = self._choice.ratio_at(self.state.steps)
        return sum(count_of(ratio, numel) for numel in self.numels)
