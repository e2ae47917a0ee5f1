"""A nested state and its tensors, separated to be sent: the tensors as they lie, all else pickled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["allocate_tensors", "extract_tensors"]


class _TensorSpec(NamedTuple):
    """What travels in a tensor's place: enough to make room for it, on this rank's own device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


def extract_tensors(tree: Any) -> tuple[Any, list[Tensor]]:
    """Return (an outline of nested dicts, lists and tuples, the tensors in it)."""
    tensors: list[Tensor] = []

    def take_out(tensor: Tensor) -> _TensorSpec:
        tensors.append(tensor)
        return _TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    return _replace(tree, Tensor, take_out), tensors


def allocate_tensors(outline: Any) -> tuple[Any, list[Tensor]]:
    """Return (the tree of an outline, the tensors in it, to be filled), in the order of `extract_tensors`."""
    tensors: list[Tensor] = []

    def allocate(entry: _TensorSpec) -> Tensor:
        tensors.append(entry.empty())
        return tensors[-1]

    return _replace(outline, _TensorSpec, allocate), tensors


def _replace(tree: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which every leaf of `kind` is replaced."""
    if isinstance(tree, kind):
        return by(tree)
    if isinstance(tree, dict):
        return {key: _replace(value, kind, by) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replace(value, kind, by) for value in tree)
    return tree
