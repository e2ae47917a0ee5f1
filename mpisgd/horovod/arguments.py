"""Arguments of Horovod's functions, looked at before anything is sent: what is wrong is named."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import as_index, shown
from mpisgd.errors import UnsupportedTensor

__all__ = [
    "as_number",
    "as_rank",
    "as_ranks",
    "as_tensor",
    "as_tensors",
    "check_compression",
    "check_name",
    "check_optimizer",
]


def as_tensor(kind: str, value: Any, what: str = "tensor") -> Tensor:
    """Return `value`, or raise UnsupportedTensor."""
    if not isinstance(value, Tensor):
        raise UnsupportedTensor(f"{kind}: {what} is a {type(value).__name__}; expected a torch.Tensor")
    return value


def as_tensors(kind: str, value: Any) -> list[Tensor]:
    """Return a list of tensors of one device as such, or raise."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"{kind}: tensors={shown(value)}; grouped operations take a list of at least one tensor"
        )
    checked = [as_tensor(kind, tensor, f"tensors[{i}]") for i, tensor in enumerate(value)]
    if len({tensor.device for tensor in checked}) > 1:
        raise ValueError(f"{kind}: Tensors in list must be on same device.")
    return checked


def as_rank(kind: str, value: Any) -> int:
    """Return a root rank as an integer, or raise ValueError."""
    try:
        return as_index(value)
    except TypeError:
        raise ValueError(f"{kind}: root_rank={shown(value)}; expected a rank of the job") from None


def as_ranks(kind: str, what: str, values: Sequence[Any]) -> list[int]:
    """Return the ranks in a list as integers, or raise ValueError."""
    ranks = []
    for value in values:
        try:
            ranks.append(as_index(value))
        except TypeError:
            raise ValueError(f"{kind}: {what} has {shown(value)} in it; expected ranks") from None
    return ranks


def as_number(kind: str, what: str, value: Any) -> float:
    """Return `value` as a number, or raise ValueError."""
    try:
        return float("not a number" if isinstance(value, str | bytes) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError, NotImplementedError):
        raise ValueError(f"{kind}: {what}={shown(value)}; expected a number") from None


def check_name(kind: str, name: Any) -> None:
    """Raise ValueError unless `name` is some text, or None."""
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{kind}: name={shown(name)}; expected some text, or None")


def check_compression(kind: str, compression: Any) -> None:
    """Raise ValueError unless `compression` has what Horovod's have."""
    of = compression if isinstance(compression, type) else type(compression)
    if not all(hasattr(of, method) for method in ("compress", "decompress")):
        raise ValueError(
            f"{kind}: compression={shown(compression)}; expected one of hvd.Compression's, or a class with "
            "compress and decompress"
        )


def check_optimizer(kind: str, optimizer: Any) -> None:
    """Raise ValueError unless `optimizer` is one of torch's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"{kind}: optimizer is a {type(optimizer).__name__}; expected a torch optimizer")
