"""`check_in_sync`: whether the ranks still hold the same numbers, and if not, what differs where.

Ranks that start equal and step by the same gradients stay equal to the last bit. What makes them drift apart
is silent: a seed that one rank does not set, a parameter changed outside the optimizer, a layer that is left
out of it, memory that flips a bit.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.arguments import ranks_text
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, OutOfSync, UnsupportedTensor
from mpisgd.job.lifecycle import group_or_world
from mpisgd.methods.sharded.forward_overlap import wait_for_parameters
from mpisgd.parameters.fingerprint import fingerprints
from mpisgd.parameters.parameter_names import agree_on, describe, name_parameters
from mpisgd.sharding.layerwise.in_files import without_streamed

__all__ = ["check_in_sync", "check_tensors_in_sync"]

NAME = "check_in_sync"
MOST_NAMES = 5
PLAIN = (bool, int, float, complex, str, bytes, type(None))

State = torch.nn.Module | torch.optim.Optimizer | Mapping[str, Any] | Iterable[tuple[str, Any]]


def check_in_sync(state: State, group: Group | None = None) -> None:
    """Raise on every rank unless all ranks hold the same bits.

    Collective: all ranks of `group` call it for the same model.

    Args:
        state: a module (its parameters and buffers), an optimizer (its parameters, its state and its
            hyperparameters), a nested state dict, or (name, tensor) pairs. Of values other than tensors,
            numbers and texts only the type is compared. BatchNorm's statistics are buffers which differ while
            training unless the module is a `SyncBatchNorm`: pass `model.named_parameters()` then.
        group: defaults to all processes of the job.

    Raises:
        OutOfSync: names the first tensors that differ, and which ranks hold which value.
        CollectiveMismatch: names, shapes or dtypes differ between ranks.
        UnsupportedTensor: a tensor without values (meta), or on an unsupported device; found locally.

    Cost: one pass over the tensors and one small exchange.
    """
    wait_for_parameters()
    group = group_or_world(group)
    check_tensors_in_sync(without_streamed(NAME, _entries(state), group), group)


def check_tensors_in_sync(named: Sequence[tuple[str, Any]], group: Group) -> None:
    """As `check_in_sync`, for (name, value) pairs."""
    for name, value in named:
        if isinstance(value, Tensor) and not (value.is_cpu or on_device(value)):
            raise UnsupportedTensor(f"{NAME}: {name} is on {value.device}, where its values cannot be read")
    mine = _digests([value for _, value in named])
    told = hashlib.blake2b(repr(mine).encode(), digest_size=8).digest()
    everyones = torch.empty(group.size, 8, dtype=torch.uint8)

    def exchange() -> None:
        group.queue.communicator.all_gather(
            everyones.view(-1), torch.frombuffer(bytearray(told), dtype=torch.uint8)
        )

    agree_on(NAME, named, group, action=exchange)
    if bool((everyones != everyones[0]).any()):
        raise OutOfSync(_report(named, mine, group))


def _entries(state: State) -> list[tuple[str, Any]]:
    if isinstance(state, torch.nn.Module):
        return [*state.named_parameters(), *state.named_buffers()]
    if isinstance(state, torch.optim.Optimizer):
        return _entries_of_optimizer(state)
    if isinstance(state, Mapping):
        return list(_leaves("", state))
    single = not isinstance(state, Iterable) or isinstance(state, (Tensor, str, bytes))
    pairs: list[Any] = [state] if single else list(state)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidArgument(
            f"{NAME}: state is a {type(state).__name__}; expected a module, an optimizer, a state dict or "
            "(name, tensor) pairs"
        )
    return pairs


def _entries_of_optimizer(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    named = name_parameters(optimizer, None)
    entries: list[tuple[str, Any]] = list(named)
    states = optimizer.state_dict()["state"]  # of all parameters, also where ranks share them
    for index, (name, _) in enumerate(named):
        entries += _leaves(f"{name}: ", states.get(index, {}))
    for number, group in enumerate(optimizer.param_groups):
        entries += _leaves(f"group {number}: ", {k: v for k, v in group.items() if k != "params"})
    return entries


def _leaves(prefix: str, tree: Any) -> Iterable[tuple[str, Any]]:
    """Yield what is in nested mappings and lists, with its path as its name."""
    if isinstance(tree, Mapping):
        pairs: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        yield prefix.rstrip(".: "), tree
        return
    for key, value in pairs:
        deeper = isinstance(value, (Mapping, list, tuple))
        yield from _leaves(f"{prefix}{key}" + "." * deeper, value)


def _digests(values: Sequence[Any]) -> list[int]:
    """Return a number for each value."""
    of_tensors = iter(fingerprints([value for value in values if isinstance(value, Tensor)]))
    return [next(of_tensors) if isinstance(value, Tensor) else _digest_of(value) for value in values]


def _digest_of(value: Any) -> int:
    text = repr(value) if isinstance(value, PLAIN) else ""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _report(named: Sequence[tuple[str, Any]], mine: Sequence[int], group: Group) -> str:
    """Raise, and tell what differs first, and which ranks hold what. Collective."""
    digests = _gather(list(mine), group)
    places = [i for i in range(len(named)) if len({theirs[i] for theirs in digests}) > 1]
    texts = _gather([_text_of(named[i][1], mine[i]) for i in places[:MOST_NAMES]], group)
    lines = [f"{NAME}: {len(places)} of {len(named)} entries differ between the ranks of '{group.name}':"]
    for at, i in enumerate(places[:MOST_NAMES]):
        lines.append(f"  {describe(*named[i])}")
        held: dict[str, list[int]] = defaultdict(list)
        for rank, told in zip(group.ranks, texts, strict=True):
            held[told[at]].append(rank)
        lines += [f"      {ranks_text(ranks)}: {text}" for text, ranks in held.items()]
    if len(places) > MOST_NAMES:
        lines.append(f"  ... and {len(places) - MOST_NAMES} more")
    return "\n".join(lines)


def _gather(mine: Any, group: Group) -> list[Any]:
    everyones: list[Any] = [None] * group.size
    all_gather_object(everyones, mine, group)
    return everyones


def _text_of(value: Any, digest: int) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, PLAIN) else type(value).__name__
    values = value.detach().coalesce().values() if value.is_sparse else value.detach()
    wide = torch.complex128 if values.is_complex() else torch.float64
    norm = torch.linalg.vector_norm(values.to(wide)).item()
    return f"hash {digest:016x}, norm {norm:.10g}"
