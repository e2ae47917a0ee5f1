"""`TopK`: the largest elements of each gradient travel.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; Stich, Cordonnier and Jaggi
2018, "Sparsified SGD with Memory".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpisgd.arguments import check_flag, check_ratio
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.residual import Waiting, memory_of
from mpisgd.compress.selection import count_of, top_k_of_each
from mpisgd.compress.sparse_reducer import SparseCodec, SparseReducer
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.top_k import paper

__all__ = ["TopK", "TopKReducer"]


@dataclass(frozen=True)
class TopK(WideCompressor):
    """Sends the elements of largest magnitude of each parameter's gradient, as values and indices.

        m_i = g_i + e_i                        gradient and residual of rank i
        s_i = m_i where |m_i| is among the k largest of a parameter, else 0
        e_i = m_i - s_i
        g   = mean of s_i over the ranks       (or the sum, with op=SUM)

    It is a contraction: |m - s|^2 <= (1 - k / n) |m|^2 for the n elements of a parameter.

    Attributes:
        ratio: k / n, above 0 and up to 1; at least one element of each parameter is sent.
        error_feedback: whether the rest is added to the next gradient. Without it, SGD may not converge.

    Raises:
        InvalidArgument: at construction.

    Cost: sends (size - 1) k words and as many indices of 32 bits, or less. Keeps one residual the size of the
        gradients, this rank's own: see `mpisgd.compress.residual`.
    """

    ratio: float
    error_feedback: bool = True

    @classmethod
    def examples(cls) -> Sequence["TopK"]:
        """See `Compressor`."""
        return (cls(ratio=0.3), cls(ratio=0.5, error_feedback=False))

    def __post_init__(self) -> None:
        check_ratio("TopK", "ratio", self.ratio)
        check_flag("TopK", "error_feedback", self.error_feedback)

    def codec(self, layout: BucketLayout) -> SparseCodec:
        """Return the codec of the largest elements of each parameter."""
        numels = [shape.numel() for shape in layout.shapes]
        count = sum(count_of(self.ratio, numel) for numel in numels)
        return SparseCodec(layout, lambda flat, _: top_k_of_each(flat, numels, self.ratio), count)

    def wide_reducer(self, layout: BucketLayout) -> "TopKReducer":
        """Return the reducer, which sends the largest elements of a bucket."""
        return TopKReducer(layout, self)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        Elements with their indices go to all ranks; magnitudes of a parameter are compared.
        """
        return Coding(element_s=15e-9, copies=0.0, of_largest=1.25)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.TopK(ratio=self.ratio, feedback=self.error_feedback)


class TopKReducer(SparseReducer):
    """The working part of `TopK`."""

    def __init__(self, layout: BucketLayout, choice: TopK) -> None:
        state = Waiting()
        super().__init__(layout, memory_of(layout, choice.error_feedback, state), state)
        self._ratio = choice.ratio
        self._count = sum(count_of(choice.ratio, numel) for numel in self.numels)

    def select(self, meant: Tensor) -> Tensor:
        """Return the indices of the largest elements of each parameter."""
        return top_k_of_each(meant, self.numels, self._ratio)

    def count(self) -> int:
        """Return k of all parameters together."""
        return self._count
