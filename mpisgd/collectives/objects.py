"""Collectives on Python objects. They are pickled: slow, and only between ranks of one job.

The tensors of a nested state can be separated from it, to be sent as they lie.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mpisgd.arguments import check_objects
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.job.lifecycle import group_or_world

__all__ = [
    "Allocate",
    "all_gather_object",
    "allocate_tensors",
    "broadcast_object",
    "extract_tensors",
    "gather_object",
    "scatter_object",
]

T = TypeVar("T")


def broadcast_object(obj: Any = None, src: int = 0, group: Group | None = None) -> Any:
    """Return the object of rank `src`, on every rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        obj: what to send, used on `src` only, which gets the very same object back.
        src: global rank of the one that has it.
        group: defaults to all processes of the job.

    Raises:
        InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.
    """
    group = group_or_world(group)
    root = group.group_rank("broadcast_object", "src", src)
    payload = pickle.dumps(obj) if group.rank == root else None
    got = _run(
        group,
        Operation("broadcast_object", root=root),
        lambda: group.queue.communicator.broadcast_object(payload, root),
    )
    return obj if group.rank == root else pickle.loads(got)


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None) -> None:
    """Put the object of the r-th rank into `object_list[r]` of every rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        object_list: list of `group.size` entries; overwritten.
        obj: the object of this rank.
        group: defaults to all processes of the job.

    Raises:
        ShapeMismatch: the list has another length; found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.
    """
    group = group_or_world(group)
    check_objects("all_gather_object", "object_list", object_list, group.size, output=True)
    payload = pickle.dumps(obj)
    got = _run(
        group, Operation("all_gather_object"), lambda: group.queue.communicator.all_gather_object(payload)
    )
    object_list[:] = map(pickle.loads, got)


def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group | None = None
) -> None:
    """Put the object of the r-th rank into `object_gather_list[r]` of rank `dst`.

    Collective: all ranks of `group` call it in the same order.

    Args:
        obj: the object of this rank.
        object_gather_list: on `dst`, a list of `group.size` entries, overwritten; None on the others.
        dst: global rank of the one that gets them.
        group: defaults to all processes of the job.

    Raises:
        InvalidRank, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.
    """
    group = group_or_world(group)
    root = group.group_rank("gather_object", "dst", dst)
    if group.rank == root:
        check_objects("gather_object", "object_gather_list", object_gather_list, group.size, output=True)
    payload = pickle.dumps(obj)
    got = _run(
        group,
        Operation("gather_object", root=root),
        lambda: group.queue.communicator.gather_object(payload, root),
    )
    if object_gather_list is not None and got is not None:  # only on dst
        object_gather_list[:] = map(pickle.loads, got)


def scatter_object(objects: Sequence[Any] | None = None, src: int = 0, group: Group | None = None) -> Any:
    """Return `objects[r]` of rank `src`, on the r-th rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        objects: on `src`, one object per rank; None on the others.
        src: global rank of the one that has them.
        group: defaults to all processes of the job.

    Raises:
        InvalidRank, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.
    """
    group = group_or_world(group)
    root = group.group_rank("scatter_object", "src", src)
    payloads: list[bytes] | None = None
    if group.rank == root:
        check_objects("scatter_object", "objects", objects, group.size)
        payloads = [pickle.dumps(obj) for obj in objects or ()]
    got = _run(
        group,
        Operation("scatter_object", root=root),
        lambda: group.queue.communicator.scatter_object(payloads, root),
    )
    return pickle.loads(got)


def _run(group: Group, operation: Operation, action: Callable[[], T]) -> T:
    """Run an action in the group's queue, and return its result."""
    results: list[T] = []
    group.queue.run(operation, lambda: results.append(action()))
    return results[0]


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]  # returns a contiguous tensor with any content


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


def allocate_tensors(outline: Any, empty: Allocate | None = None) -> tuple[Any, list[Tensor]]:
    """Return (the tree of an outline, the tensors in it, to be filled), in the order of `extract_tensors`.

    Args:
        outline: the outline.
        empty: makes the tensors of the CPU.
    """
    tensors: list[Tensor] = []

    def allocate(entry: _TensorSpec) -> Tensor:
        made = None if empty is None or entry.device_type != "cpu" else empty(entry.shape, entry.dtype)
        tensors.append(entry.empty() if made is None else made)
        return tensors[-1]

    return _replace(outline, _TensorSpec, allocate), tensors


def _replace(tree: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which every leaf of `kind` is replaced."""
    if isinstance(tree, kind):
        return by(tree)
    if isinstance(tree, dict):
        return {key: _replace(value, kind, by) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [_replace(value, kind, by) for value in tree]
        # A NamedTuple takes its fields one by one.
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree
