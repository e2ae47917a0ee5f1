"""`SavedBytes`: what autograd keeps for the backward pass."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts what autograd keeps while it is entered, each memory once, without parameters.

    Args:
        where: called for each of them; returns what it belongs to.

    Attributes:
        by_place: bytes so far, by what `where` has returned.
    """

    def __init__(self, where: Callable[[], str] = lambda: "") -> None:
        self.by_place: Counter[str] = Counter()
        self._where = where
        self._seen: dict[int, Any] = {}
        self._hooks: Any = None

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.by_place.values())

    def __enter__(self) -> "SavedBytes":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(None, None, None)
        self._seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        base = tensor._base if tensor._base is not None else tensor
        if not isinstance(base, nn.Parameter) and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage  # alive, or another one might get its address
            self.by_place[self._where()] += storage.nbytes()
        return tensor
