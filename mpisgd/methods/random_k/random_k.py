"""`RandomK`: random elements of the gradients travel, the same ones from all ranks.

Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory"; Wangni and others 2018, "Gradient
Sparsification for Communication-Efficient Distributed Optimization".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.arguments import check_flag, check_ratio, check_seed
from mpisgd.compress.compressor import BucketLayout, BucketReducer
from mpisgd.compress.randomness import generator
from mpisgd.compress.residual import Waiting, is_finite, memory_of
from mpisgd.compress.selection import count_of
from mpisgd.compress.sparse_reducer import SparseCodec
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.random_k import paper

__all__ = ["RandomK", "RandomKReducer", "random_indices"]


@dataclass(frozen=True)
class RandomK(WideCompressor):
    """Sends k random elements of each bucket; all ranks draw the same indices, so only values are sent.

        m_i = g_i + e_i                        gradient and residual of rank i
        s_i = m_i at k random indices, else 0  (without a residual times n / k, which is unbiased)
        e_i = m_i - s_i
        g   = mean of s_i over the ranks       (or the sum, with op=SUM)

    If some m_i is not finite, all of g is NaN on all ranks, whichever elements were drawn.

    Attributes:
        ratio: k / n of the n elements of a bucket, above 0 and up to 1.
        error_feedback: whether the rest is added to the next gradient. Without it, the sent elements are
            scaled so that their expectation is the gradient.
        seed: seed of the random indices, which differ by step.

    Raises:
        InvalidArgument: at construction.

    Cost: an all-reduce of k words. Keeps one residual the size of the gradients, this rank's own: see
        `mpisgd.compress.residual`.
    """

    ratio: float
    error_feedback: bool = True
    seed: int = 0

    @classmethod
    def examples(cls) -> Sequence["RandomK"]:
        """See `Compressor`."""
        return (cls(ratio=0.5), cls(ratio=0.25, error_feedback=False, seed=1))

    def __post_init__(self) -> None:
        check_ratio("RandomK", "ratio", self.ratio)
        check_flag("RandomK", "error_feedback", self.error_feedback)
        check_seed("RandomK", self.seed)

    def codec(self, layout: BucketLayout) -> SparseCodec:
        """Return the codec of random elements with their indices, which differ by rank.

        It does not scale them, so E |x - C(x)|^2 = (1 - k / n) |x|^2.
        """
        count = count_of(self.ratio, layout.numel)

        def select(flat: Tensor, random: np.random.Generator) -> Tensor:
            drawn = random.choice(flat.numel(), count, replace=False, shuffle=False)
            return torch.from_numpy(drawn).to(flat.device)

        return SparseCodec(layout, select, count)

    def wide_reducer(self, layout: BucketLayout) -> "RandomKReducer":
        """Return the reducer, which sends random elements of a bucket."""
        return RandomKReducer(layout, self)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        A sum of the elements that all ranks have drawn alike, by indices of 8 bytes.
        """
        return Coding(collectives=("all_reduce",), element_s=10e-9, copies=3 * self.ratio)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.RandomK(ratio=self.ratio, feedback=self.error_feedback)


def random_indices(numel: int, count: int, seed: int, step: int) -> Tensor:
    """Return `count` different indices below `numel`, each set of them equally likely."""
    drawn = generator(seed, step, numel).choice(numel, count, replace=False, shuffle=False)
    return torch.from_numpy(drawn)


class RandomKReducer(BucketReducer):
    """The working part of `RandomK`."""

    def __init__(self, layout: BucketLayout, choice: RandomK) -> None:
        self._layout = layout
        self._seed = choice.seed
        self._count = count_of(choice.ratio, layout.numel)
        self._sum = SumReducer(self._count * layout.dtype.itemsize)
        self._scale = 1.0 if choice.error_feedback else layout.numel / max(1, self._count)
        self.state = Waiting()
        self.memory = memory_of(layout, choice.error_feedback, self.state)

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the combination of its random elements; see `BucketReducer.reduce`."""
        meant = self.memory.add(bucket)
        indices = random_indices(meant.numel(), self._count, self._seed, self.state.steps).to(bucket.device)
        values = meant.index_select(0, indices)
        finite = self.memory.take_at(indices) if self.memory.keeps else is_finite(meant)
        if not finite:  # where it was not drawn the others would not see it
            values.fill_(torch.nan)
        if self._scale != 1.0:
            values *= self._scale
        self._sum.reduce(values, group, op)
        bucket.zero_().index_copy_(0, indices, values)
        if not is_finite(values):  # the drawn elements may be of parameters without a gradient
            bucket.fill_(torch.nan)
        self.state.steps += 1

    def bytes_on_the_wire(self, size: int) -> int:
        """Return the bytes that an all-reduce of k words sends."""
        return self._sum.bytes_on_the_wire(size)
