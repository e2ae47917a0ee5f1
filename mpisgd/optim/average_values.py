"""`average`: the mean of numbers over the ranks, such as a loss and an accuracy, weighted by examples."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.collectives.all_reduce import choose_algorithm, reduce_flat
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp, dtype_name
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.job.lifecycle import group_or_world

__all__ = ["average"]

NAME = "average"
T = TypeVar("T")


def average(values: T, weight: float = 1.0, group: Group | None = None) -> T:
    """Return the mean of `values` over the group: sum of weight * value / sum of weight.

    Collective: all ranks of `group` call it with the same structure. For metrics: with the number of a rank's
    examples as its weight, means of ranks become the mean over all examples. A rank without examples passes
    weight 0; its values, even NaN, are then ignored.

    Args:
        values: a number, a tensor, or dicts, lists and tuples of them; unchanged. A number becomes a float.
            A tensor stays on its device; the mean of integers or bools is a float64 tensor.
        weight: the weight of this rank, 0 or more.
        group: defaults to all processes of the job.

    Raises:
        InvalidArgument, UnsupportedTensor: found locally, before anything is sent.
        InvalidArgument: all weights are 0; raised on every rank.
        CollectiveMismatch: keys, shapes or dtypes differ between ranks; raised on every rank.

    Cost: one all-reduce in float64, through host memory.

    Example:
        >>> mpisgd.average({"loss": loss, "accuracy": num_right / num_seen}, weight=num_seen)
    """
    group = group_or_world(group)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise InvalidArgument(f"average: weight={shown(weight)}; expected a number, 0 or more")
    leaves = list(_leaves(values, "values"))
    flat = torch.cat([_as_flat(weight), *(_as_flat(leaf) for _, leaf in leaves)])
    flat[1:] = flat[1:] * weight if weight else 0.0  # not even NaN of a rank without weight counts
    structure = ", ".join(f"{path}: {_kind(leaf)}" for path, leaf in leaves)
    group.queue.run(
        Operation(NAME, dtype="float64", shape=(len(flat),), extra=structure),
        lambda: reduce_flat(group, flat, ReduceOp.SUM, choose_algorithm(group, "auto", flat)),
    )
    if flat[0] == 0:
        raise InvalidArgument(f"average: the weights of all {group.size} ranks are 0; there is no mean")
    parts = iter(torch.split(flat[1:] / flat[0], [_numel(leaf) for _, leaf in leaves]))
    result: T = _rebuilt(values, parts)
    return result


def _leaves(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors with where they are; dicts in the order of their keys as text."""
    if isinstance(values, Mapping):
        for key in sorted(values, key=str):
            yield from _leaves(values[key], f"{path}[{key!r}]")
    elif isinstance(values, list | tuple):
        for place, value in enumerate(values):
            yield from _leaves(value, f"{path}[{place}]")
    elif isinstance(values, Tensor):
        if values.is_complex() or values.layout is not torch.strided:
            raise UnsupportedTensor(
                f"average: {path} is {_kind(values)}; expected dense tensors of real numbers"
            )
        yield path, values
    elif isinstance(values, int | float) or hasattr(values, "__float__"):  # numpy's numbers, too
        yield path, values
    else:
        raise InvalidArgument(f"average: {path} is {shown(values)}; expected numbers and tensors")


def _as_flat(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", torch.float64).reshape(-1)
    return torch.tensor([float(leaf)], dtype=torch.float64)


def _kind(leaf: Any) -> str:
    """Describe what ranks must have alike of a leaf."""
    if not isinstance(leaf, Tensor):
        return "number"
    layout = "" if leaf.layout is torch.strided else f" ({leaf.layout})"
    return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}{layout}"


def _numel(leaf: Any) -> int:
    return leaf.numel() if isinstance(leaf, Tensor) else 1


def _rebuilt(values: Any, parts: Iterator[Tensor]) -> Any:
    """Return the structure of `values` with the next parts in it."""
    if isinstance(values, Mapping):
        found = {key: _rebuilt(values[key], parts) for key in sorted(values, key=str)}
        return {key: found[key] for key in values}
    if isinstance(values, list | tuple):
        items = [_rebuilt(value, parts) for value in values]
        if isinstance(values, tuple) and hasattr(values, "_fields"):
            return type(values)(*items)
        return tuple(items) if isinstance(values, tuple) else items
    part = next(parts)
    if not isinstance(values, Tensor):
        return float(part)
    dtype = values.dtype if values.is_floating_point() else torch.float64
    return part.reshape(values.shape).to(values.device, dtype)
