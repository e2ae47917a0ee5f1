"""Copies of nested state in memory that is used again, so that a commit costs one pass over the tensors."""

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_tree"]


def copy_tree(source: Any, into: Any = None) -> Any:
    """Return a copy of `source` on the host, made in the memory of `into` where that fits.

    Args:
        source: dicts, lists and tuples of tensors and of whatever can be deep-copied.
        into: an earlier copy that is not needed any more; it is overwritten.
    """
    if isinstance(source, Tensor):
        return _copy_tensor(source, into)
    if isinstance(source, dict):
        earlier = into if isinstance(into, dict) else {}
        copies = {key: copy_tree(value, earlier.get(key)) for key, value in source.items()}
        return copies if type(source) is dict else _like(source, copies)
    if type(source) in (list, tuple):
        known = into if isinstance(into, type(source)) and len(into) == len(source) else [None] * len(source)
        return type(source)(copy_tree(value, old) for value, old in zip(source, known, strict=True))
    return copy.deepcopy(source)


def _copy_tensor(source: Tensor, into: Any) -> Tensor:
    fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (source.shape, source.dtype)
    if source.layout != torch.strided:
        return source.detach().cpu().clone()
    target = into if fits else torch.empty(source.shape, dtype=source.dtype)
    return target.copy_(source.detach())


def _like(source: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Return `values` as a dict of the kind of `source`: an ordered one, with torch's metadata."""
    made = copy.copy(source)
    made.update(values)
    return made
