"""How far a run is from the one it must equal: over all tensors and ranks, printed, judged by all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verdicts import everyone, referee

# Nothing but numbers moved, or whole numbers were added.
EXACT = 0.0


def whole(tensor: Tensor) -> Tensor:
    """The plain tensor that a distributed one stands for. Collective over its mesh."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def gradients(model: nn.Module) -> list[Tensor]:
    """All of them; a missing one is an error here."""
    grads = [param.grad for param in model.parameters()]
    assert None not in grads
    return grads


def difference(ours: Tensor, expected: Tensor) -> float:
    """The largest one of two tensors; infinite where they do not even have one shape and dtype."""
    if (ours.shape, ours.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    return float((ours - expected).abs().max()) if ours.numel() else 0.0


def _largest(differences: list[float]) -> float:
    """Unlike Python's, torch's maximum keeps a NaN."""
    return float(torch.tensor([0.0, *differences], dtype=torch.float64).max())


def check_close(ours: Iterable[Tensor], expected: Iterable[Tensor], limit: float) -> None:
    """Fail on all ranks where two lists of tensors are further apart than `limit` on one of them.

    Ranks may have different lists, also empty ones.
    """
    apart = [difference(whole(mine), whole(right)) for mine, right in zip(ours, expected, strict=True)]
    largest = _largest(referee().allgather(_largest(apart)))
    print(f"max difference {largest:.1e}")
    everyone(largest <= limit, f"max difference {largest:.1e} is above {limit:.1e}")
