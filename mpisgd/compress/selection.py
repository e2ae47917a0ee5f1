"""Which elements of a bucket travel: pure functions and the counts that go with them.

The k largest of n numbers are searched among those that pass a threshold, which is taken from a sample such
that a few more than k pass. The result is exact, at the cost of a comparison and not of a partial sort.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["at_least", "count_of", "top_k", "top_k_of_each", "top_k_of_rows"]

SAMPLE_NUMEL = 2**14
SAMPLED_FROM = 8 * SAMPLE_NUMEL  # below it a sample saves nothing


def count_of(ratio: float, numel: int) -> int:
    """Return how many of `numel` elements a ratio means: at least one of any."""
    return min(numel, max(1, round(ratio * numel)))


def at_least(flat: Tensor, value: float) -> Tensor:
    """Return the indices of the elements of magnitude `value` or more, ascending; NaN counts as more."""
    return (~(flat.abs() < value)).nonzero().view(-1)


def top_k(flat: Tensor, k: int) -> Tensor:
    """Return the indices of the `k` elements of largest magnitude, in some order.

    Args:
        flat: [n]; NaN counts as largest.
        k: 0 to n.
    """
    magnitudes, numel = flat.abs(), flat.numel()
    if k == numel:
        return torch.arange(numel, device=flat.device)
    if numel >= SAMPLED_FROM and 8 * k <= numel:
        candidates = _candidates(magnitudes, k)
        if candidates.numel() >= k:
            return candidates[magnitudes[candidates].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices


def _candidates(magnitudes: Tensor, k: int) -> Tensor:
    """Return the indices of those that are about as large as the k largest: with luck some more than k."""
    sample = magnitudes[:: magnitudes.numel() // SAMPLE_NUMEL]
    expected = k * sample.numel() / magnitudes.numel()
    place = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 8))
    threshold = sample.topk(place, sorted=False).values.min()
    return (~(magnitudes < threshold)).nonzero().view(-1)


def top_k_of_each(flat: Tensor, numels: Sequence[int], ratio: float) -> Tensor:
    """Return the indices in `flat` of the largest elements of each of its parts.

    Args:
        flat: [sum(numels)].
        numels: elements of each part.
        ratio: how many of each are taken, see `count_of`.
    """
    parts, start = [], 0
    for numel in numels:
        parts.append(top_k(flat[start : start + numel], count_of(ratio, numel)).add_(start))
        start += numel
    return torch.cat(parts)


def top_k_of_rows(rows: Tensor, k: int) -> Tensor:
    """Return the columns of the `k` elements of largest magnitude in each row, ascending: [n, k].

    Of equal magnitudes the first ones count as larger, on any device.

    Args:
        rows: [n, m]; NaN counts as infinite.
        k: 1 to m.
    """
    number, length = rows.shape
    if k == length:
        return torch.arange(length, device=rows.device).expand(number, length)
    magnitudes = rows.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = magnitudes.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = magnitudes >= least
    has_more = (chosen.sum(1) > k).nonzero().view(-1)  # of equals that are the least
    if has_more.numel():
        those, bound = magnitudes[has_more], least[has_more]
        above, equal = those > bound, those == bound
        missing = k - above.sum(1, keepdim=True)
        chosen[has_more] = above | (equal & (equal.cumsum(1) <= missing))
    return chosen.nonzero()[:, 1].view(number, k)
