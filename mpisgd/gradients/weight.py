"""`Weight`: what the gradients of each rank count in their mean, where ranks have unequal batches.

With G_r the sum of the gradients that rank r has computed in a window, of n_r examples each, the last time,
N_r examples altogether, in k_r backward passes:

    g = k (n_1 G_1 + ... + n_p G_p) / (N_1 + ... + N_p)          k: the largest k_r

For one pass that is the gradient of the mean loss over the joined examples. For several, of which each has a
loss divided by their number, it is that of the mean over all examples of the window.

Products with whole numbers come before the sum and one division after it, so that the result is rounded once.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor

from mpisgd.compress.compressor import Compressor, has_momentum
from mpisgd.errors import InvalidArgument

__all__ = ["Count", "Weight", "weight_of", "why_not_weighted"]

NARROW = 2  # bytes: whole numbers times such a float would overflow, or be rounded


class Count(NamedTuple):
    """What a rank has computed gradients of since these were reduced.

    Attributes:
        last: examples of each backward pass. One with another number rescales what there is. 0: it has no
            more data, and nothing left.
        total: examples of all passes.
        passes: how many there were. A rank with data and without a backward counts as one with all passes.
        again: whether it adds to what was reduced before.
    """

    last: int = 0
    total: int = 0
    passes: int = 0
    again: int = 0


class Weight(NamedTuple):
    """What one rank multiplies its gradients by, and what becomes of the sum.

    Attributes:
        mine: a whole number.
        ratio: what the sum is multiplied by.
        averaged_by: the number of ranks, where these take the mean of what they send, and not the sum.
    """

    mine: int
    ratio: Fraction
    averaged_by: int = 1

    def _is_before(self, flat: Tensor) -> bool:
        """Return whether all of it comes before the sum."""
        return self.averaged_by > 1 or flat.element_size() <= NARROW

    def before(self, flat: Tensor) -> None:
        """Multiply this rank's gradients, before the others look at them."""
        factor = float(self.mine * self.ratio * self.averaged_by) if self._is_before(flat) else self.mine
        if factor != 1:
            flat.mul_(factor)

    def undo(self, flat: Tensor) -> None:
        """Give them back as they were; where they count nothing there are none."""
        factor = float(self.mine * self.ratio * self.averaged_by) if self._is_before(flat) else self.mine
        if factor not in (0, 1):
            flat.div_(factor)

    def after(self, flat: Tensor) -> None:
        """Divide the sum."""
        if self._is_before(flat):
            return
        if self.ratio.numerator != 1:
            flat.mul_(self.ratio.numerator)
        if self.ratio.denominator != 1:
            flat.div_(self.ratio.denominator)


def why_not_weighted(compressor: Compressor) -> str:
    """Return why gradients that a compressor sends cannot be weighted, "" if they can."""
    traits = compressor.traits
    if traits.replaces_op:
        return f"{compressor}: no gradient counts nothing in it"
    if has_momentum(compressor):
        return f"{compressor}: it has a momentum, which a rank without data would go on sending"
    if not (traits.has_magnitudes and traits.is_homogeneous):
        return f"{compressor}: what it sends of a gradient does not grow with the gradient"
    return ""


def weight_of(counts: Sequence[Count], place: int, *, averages: bool = False) -> Weight:
    """Return the weight of one rank's gradients.

    Args:
        counts: of all ranks.
        place: of this one.
        averages: whether the ranks take a mean of what they send.

    Raises:
        InvalidArgument: what was reduced before would be weighted again; raised on every rank.
    """
    passes = max(1, *(count.passes for count in counts))
    total = sum(count.total if count.passes else count.last * passes for count in counts)
    unit = math.gcd(*(count.last for count in counts))
    whole = [count.last // unit for count in counts]
    ratio = Fraction(passes * unit, total)
    if any(count.again for count in counts) and sum(whole) * ratio != 1:
        error = InvalidArgument(
            "join: gradients that were reduced before would be weighted once more, since the ranks have "
            "different numbers of examples in this window; call optimizer.zero_grad() before"
        )
        error.on_every_rank = True
        raise error
    return Weight(whole[place], ratio, len(counts) if averages else 1)
