"""`digests`: by which ranks compare what they have alike of a state."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["digests"]


def digests(alike: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each field that ranks have alike: equal where all bits in it are."""
    return {name: _digest(value) for name, value in alike.items()}


def _digest(value: Any) -> str:
    told = hashlib.blake2b(digest_size=8)
    _update(told, value)
    return told.hexdigest()


def _update(told: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        told.update(f"{value.dtype}{list(value.shape)}".encode())
        told.update(flat.numpy())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            told.update(f"{key}:".encode())
            _update(told, value[key])
    elif isinstance(value, (list, tuple)):
        told.update(f"[{len(value)}".encode())
        for entry in value:
            _update(told, entry)
    else:
        told.update(repr(value).encode())
