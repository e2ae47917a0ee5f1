"""`Threshold`: the elements of a gradient that pass a threshold travel.

Dryden and others 2016, "Communication Quantization for Data-Parallel Training of Deep Neural Networks";
Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from mpisgd.arguments import check_flag, check_positive
from mpisgd.compress.compressor import BucketLayout, Traits
from mpisgd.compress.residual import Waiting, memory_of
from mpisgd.compress.selection import at_least
from mpisgd.compress.sparse_reducer import SparseReducer
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.threshold import paper

__all__ = ["Threshold", "ThresholdReducer"]


@dataclass(frozen=True)
class Threshold(WideCompressor):
    """Sends the elements whose magnitude is at least `value`, as values and indices.

        m_i = g_i + e_i                        gradient and residual of rank i
        s_i = m_i where |m_i| >= value, else 0
        e_i = m_i - s_i
        g   = mean of s_i over the ranks       (or the sum, with op=SUM)

    Their number depends on the data and differs by rank. With error feedback no residual exceeds `value`.

    Attributes:
        value: positive. Gradients are compared after GradScaler has scaled them and
            `gradient_predivide_factor` has divided them.
        error_feedback: whether the rest is added to the next gradient.

    Raises:
        InvalidArgument: at construction.

    Cost: an all-gather of one integer, then that of `TopK` with the number of elements sent.
    """

    value: float
    error_feedback: bool = True

    @classmethod
    def examples(cls) -> Sequence["Threshold"]:
        """See `Compressor`."""
        return (cls(value=1.0), cls(value=0.5, error_feedback=False))

    def __post_init__(self) -> None:
        check_positive("Threshold", "value", self.value)
        check_flag("Threshold", "error_feedback", self.error_feedback)

    @cached_property
    def traits(self) -> Traits:
        """Not homogeneous: of larger gradients more elements are sent."""
        return Traits(is_homogeneous=False, has_error_feedback=self.error_feedback)

    def wide_reducer(self, layout: BucketLayout) -> "ThresholdReducer":
        """Return the reducer, which sends the large elements of a bucket."""
        return ThresholdReducer(layout, self)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        It sends as `TopK`, as many elements as pass.
        """
        return Coding(element_s=5e-9, by_data=True)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.Threshold(tau=self.value, feedback=self.error_feedback)


class ThresholdReducer(SparseReducer):
    """The working part of `Threshold`."""

    def __init__(self, layout: BucketLayout, choice: Threshold) -> None:
        state = Waiting()
        super().__init__(layout, memory_of(layout, choice.error_feedback, state), state)
        self._value = choice.value

    def select(self, meant: Tensor) -> Tensor:
        """Return the indices of all that pass the threshold."""
        return at_least(meant, self._value)

    def count(self) -> None:
        """Return None: it depends on the data."""
