"""`Block`: a part of a model that pipelines do not cut, and which tensor parallelism may divide.

    embedding | block 0 | block 1 | ... | head        between any two of them a pipeline can be cut

A block of a transformer whose matrices are divided by columns and then by rows (Shoeybi and others 2019,
"Megatron-LM") needs an all-reduce of its activations behind its attention and one behind its feed-forward
layers, and as many in the backward pass.
"""

import math
from dataclasses import dataclass, replace

from mpisgd.tools.plan.cluster import check_not_negative

__all__ = ["Block"]

Shape = tuple[int, ...]
# For each all-reduce, the input of a norm and that of the matrix after it: every rank has them whole.
WHOLE_INPUTS = 2


@dataclass(frozen=True)
class Block:
    """A block's part of a rank's step, for all examples of the rank.

    Attributes:
        name: of it.
        shapes: of its parameters.
        forward_s: what it takes forward, on one rank.
        backward_s: and backward.
        output_bytes: what goes to the next block.
        activation_bytes: what is kept for the backward pass.
        all_reduces: of its output forward, and as many backward, where tensor parallelism divides it; 0: it
            is not divided, all ranks compute all of it.
        fixed_s: of forward_s and backward_s together, what a pass takes however few examples it has: starting
            its operations. So many micro-batches take longer than one, and the parts of a divided block
            longer than a part of it.
        divided_s: what both passes of a divided block take besides, whatever its size.
        key_bytes: of the keys and values of its attention; 0: it has none, or is not known to.
        attention: the share of its time in which it computes with them.
    """

    name: str
    shapes: tuple[Shape, ...]
    forward_s: float
    backward_s: float
    output_bytes: float = 0.0
    activation_bytes: float = 0.0
    all_reduces: int = 0
    fixed_s: float = 0.0
    divided_s: float = 0.0
    key_bytes: float = 0.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        numbers = ("forward_s", "backward_s", "output_bytes", "activation_bytes", "all_reduces")
        for name in (*numbers, "fixed_s", "divided_s", "key_bytes", "attention"):
            check_not_negative(f"block {self.name}", name, getattr(self, name))

    def numel_of(self, tp: int) -> float:
        """Return how many parameters each of `tp` ranks has: matrices are divided, vectors are not."""
        divides = tp if self.all_reduces else 1
        return sum(math.prod(shape) / (divides if len(shape) > 1 else 1) for shape in self.shapes)

    def activations_of(self, tp: int) -> float:
        """Return the bytes of activations that each of `tp` ranks keeps."""
        whole = min(self.activation_bytes, WHOLE_INPUTS * self.all_reduces * self.output_bytes)
        divides = tp if self.all_reduces else 1
        return whole + (self.activation_bytes - whole) / divides

    def seconds_of(self, share: float, tp: int) -> tuple[float, float]:
        """Return the seconds of forward and backward for a share of the examples on one of `tp` ranks.

        Without the all-reduces of these.
        """
        divides, more_s = (tp, self.divided_s) if self.all_reduces and tp > 1 else (1, 0.0)
        both_s = self.forward_s + self.backward_s
        forward = self.forward_s / both_s if both_s else 0.0
        taken_s = self.fixed_s + more_s + (both_s - self.fixed_s) * share / divides
        return taken_s * forward, taken_s * (1 - forward)

    def slower(self, factor: float) -> "Block":
        """Return the block that takes so many times as long."""
        times = ("forward_s", "backward_s", "fixed_s", "divided_s")
        return replace(self, **{name: getattr(self, name) * factor for name in times})
