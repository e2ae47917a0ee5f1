"""What the parameters of an optimizer are called, and whether all ranks have the same ones."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import dtype_name
from mpisgd.errors import InvalidArgument, UnsupportedTensor

__all__ = ["agree_on", "describe", "name_buffers", "name_parameters"]


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) of every parameter of `optimizer`, in the order of its groups.

    Args:
        optimizer: any torch optimizer.
        named_parameters: usually `model.named_parameters()`; None: the names the optimizer itself was
            given, else `group 0, parameter 3`.

    Raises:
        InvalidArgument: a name twice, or a parameter that has none.
        UnsupportedTensor: a parameter on a device whose tensors cannot be sent.
    """
    given = None if named_parameters is None else _by_identity(named_parameters)
    named = []
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            own = group.get("param_names", ())
            name = own[place] if place < len(own) else f"group {number}, parameter {place}"
            named.append((_name_of(param, given, name), _check(param, name)))
    return named


def name_buffers(named_buffers: Any) -> list[tuple[str, Tensor]]:
    """Return (name, buffer) pairs such as those of `model.named_buffers()`; None: none.

    Raises:
        InvalidArgument: something else was given.
    """
    if named_buffers is None:
        return []
    is_listed = isinstance(named_buffers, Iterable) and not isinstance(named_buffers, (Tensor, str, bytes))
    pairs = list(named_buffers) if is_listed else [named_buffers]
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
            raise InvalidArgument(
                f"DistributedOptimizer: named_buffers has a {type(pair).__name__}; expected (name, tensor) "
                "pairs such as model.named_buffers()"
            )
    return pairs


def _by_identity(named_parameters: Any) -> dict[int, str]:
    is_listed = isinstance(named_parameters, Iterable) and not isinstance(named_parameters, Tensor)
    names: dict[int, str] = {}
    seen: set[str] = set()
    for pair in list(named_parameters) if is_listed else [named_parameters]:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgument(
                f"DistributedOptimizer: named_parameters has a {type(pair).__name__}; expected (name, "
                "parameter) pairs such as model.named_parameters()"
            )
        name, param = pair
        if name in seen:
            raise InvalidArgument(f"DistributedOptimizer: named_parameters has the name {name!r} twice")
        seen.add(name)
        names.setdefault(id(param), name)  # tied weights keep their first name
    return names


def _name_of(param: Tensor, given: dict[int, str] | None, fallback: str) -> str:
    if given is None:
        return fallback
    if id(param) not in given:
        raise InvalidArgument(
            f"DistributedOptimizer: {fallback} of the optimizer, {list(param.shape)}, is not among the "
            "named_parameters; pass those of every model the optimizer trains, or leave them out"
        )
    return given[id(param)]


def _check(param: Any, name: str) -> Tensor:
    if not isinstance(param, Tensor) or not (param.is_cpu or on_device(param)):
        raise UnsupportedTensor(
            f"DistributedOptimizer: {name} is on {getattr(param, 'device', type(param))}; parameters on the "
            "CPU and on CUDA devices can be trained"
        )
    return param


def agree_on(
    kind: str,
    named: Sequence[tuple[str, Any]],
    group: Group,
    *,
    root: int = -1,
    extra: str = "",
    action: Callable[[], None] = lambda: None,
) -> None:
    """Make sure that all ranks have the same names, shapes, layouts and dtypes in the same order. Collective.

    Args:
        kind: what they are for.
        named: names with tensors, or with anything else, of which only the type counts.
        group: the ranks.
        root: group rank of one that has a part of its own, which must be the same everywhere, too.
        extra: more of that kind.
        action: what to do inside the queue once they agree.

    Raises:
        CollectiveMismatch: they have not; raised on every rank, and it shows what differs.
    """
    # Numbered, so that entries in another order show as lines that differ.
    lines = [f"#{place} {describe(name, value)}" for place, (name, value) in enumerate(named)]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    summary = f"{len(lines)} entries, hash {digest}" + (f", {extra}" if extra else "")
    group.queue.run(Operation(kind, root=root, extra=summary), action, detail=lambda: "\n".join(lines))


def describe(name: str, value: Any) -> str:
    """Describe a tensor for comparison among ranks: dtype, shape, strides; of anything else, its type."""
    if not isinstance(value, Tensor):
        return f"{name}: {type(value).__name__}"
    is_plain = value.is_contiguous() or value.layout is not torch.strided
    layout = "" if is_plain else f" strides {value.stride()}"
    return f"{name}: {dtype_name(value.dtype)} {list(value.shape)}{layout}"
