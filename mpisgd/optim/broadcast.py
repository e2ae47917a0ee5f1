"""One rank's parameters and optimizer state become everyone's: how ranks start equal."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.coalesced import broadcast_coalesced
from mpisgd.collectives.objects import allocate_tensors, broadcast_object, extract_tensors
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.fusion_buffer import laid_out
from mpisgd.job.lifecycle import group_or_world
from mpisgd.job.uncombined_training import watch_for_operations
from mpisgd.method_state import ENTRY, HasOwnState
from mpisgd.methods.sharded.forward_overlap import wait_for_parameters
from mpisgd.parameters.parameter_names import agree_on
from mpisgd.sharding.layerwise.in_files import without_streamed

__all__ = [
    "Parameters",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_tensors",
    "lay_out_state",
    "name_tensors",
    "undo_casts",
]

# Small tensors travel together, packed up to this many bytes; larger ones travel from where they are.
PACK_BYTES = 4 * 2**20

Parameters = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]


def broadcast_parameters(params: Parameters, src: int = 0, group: Group | None = None) -> None:
    """Copy the parameters and buffers of rank `src` to all ranks.

    Collective: all ranks of `group` call it for the same model.

    Args:
        params: a module (its parameters and all its buffers, BatchNorm's statistics among them), a state
            dict, or (name, tensor) pairs. Tensors are overwritten in place; other values of a state dict are
            replaced.
        src: global rank of the one that has the values.
        group: defaults to all processes of the job.

    Raises:
        InvalidRank, InvalidArgument, UnsupportedTensor: found locally, before anything is sent.
        CollectiveMismatch: names, shapes or dtypes differ between ranks; raised on every rank, names what
            differs, nothing was copied.
    """
    group = group_or_world(group)
    root = group.group_rank("broadcast_parameters", "src", src)
    named = name_tensors("broadcast_parameters", params)
    in_memory = without_streamed("broadcast_parameters", named, group)
    agree_on("broadcast_parameters", named, group, root=root)
    broadcast_tensors([value for _, value in in_memory if isinstance(value, Tensor)], src, group)
    others = {name: value for name, value in named if not isinstance(value, Tensor)}
    if others:
        assert isinstance(params, MutableMapping)
        params.update(broadcast_object(others, src, group))
    watch_for_operations(group)


def name_tensors(name: str, params: Parameters) -> list[tuple[str, Any]]:
    """Return (name, value) of what a user means by the parameters of a model.

    Args:
        name: of the function they were given to, for messages.
        params: see `broadcast_parameters`.

    Raises:
        InvalidArgument: they are something else.
    """
    wait_for_parameters()
    if isinstance(params, torch.nn.Module):
        return [*params.named_parameters(), *params.named_buffers()]
    if isinstance(params, Mapping):
        return list(params.items())
    single = not isinstance(params, Iterable) or isinstance(params, (Tensor, str, bytes))
    named: list[Any] = [params] if single else list(params)
    for entry in named:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], Tensor):
            raise InvalidArgument(
                f"{name}: expected a module, a state dict or (name, tensor) pairs, got params a "
                f"{type(params).__name__} with {_kind(entry)}; pass model.named_parameters() rather than "
                "model.parameters()"
            )
    return named


def _kind(entry: Any) -> str:
    if not isinstance(entry, tuple):
        return type(entry).__name__
    return "(" + ", ".join(type(part).__name__ for part in entry) + ")"


def broadcast_tensors(tensors: list[Tensor], src: int, group: Group) -> None:
    """Broadcast many tensors, the small ones packed; those of the CPU and those of each device apart."""
    packs: dict[torch.device, list[Tensor]] = defaultdict(list)
    packed_bytes: Counter[torch.device] = Counter()
    for tensor in tensors:
        device, nbytes = tensor.device, tensor.numel() * tensor.element_size()
        if nbytes >= PACK_BYTES:
            broadcast(tensor, src, group)
            continue
        if packed_bytes[device] + nbytes > PACK_BYTES:
            broadcast_coalesced(packs.pop(device), src, group)
            packed_bytes[device] = 0
        packs[device].append(tensor)
        packed_bytes[device] += nbytes
    for pack in packs.values():
        broadcast_coalesced(pack, src, group)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, src: int = 0, group: Group | None = None
) -> None:
    """Copy the optimizer state of rank `src` to all ranks: momenta, step counts, learning rates.

    Collective: all ranks of `group` call it for the same optimizer. The others may have no state yet, or an
    older one, as when only `src` has read a checkpoint. State of a strategy or a compressor that is the same
    on all ranks is copied from `src`, too; state that belongs to one rank, such as a residual, is reset on
    all ranks.

    Args:
        optimizer: on `src` unchanged except for the state that belongs to that rank alone; on the others its
            state is replaced, as by `load_state_dict`.
        src: global rank of the one that has the state.
        group: defaults to all processes of the job.

    Raises:
        InvalidRank, InvalidArgument: found locally, before anything is sent.
        CollectiveMismatch: the optimizers have different kinds or parameters; raised on every rank.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise InvalidArgument(f"broadcast_optimizer_state: optimizer is a {kind}; expected a torch optimizer")
    group = group_or_world(group)
    root = group.group_rank("broadcast_optimizer_state", "src", src)
    params = [(f"group {i}", p) for i, g in enumerate(optimizer.param_groups) for p in g["params"]]
    agree_on("broadcast_optimizer_state", params, group, root=root)
    mine = optimizer.state_dict()  # on every rank: those that share parameters bring it together
    if ENTRY in mine:
        mine[ENTRY] = {**mine[ENTRY], "own": None}
    outline, tensors = extract_tensors(mine) if group.rank == root else (None, [])
    outline = broadcast_object(outline, src, group)
    if group.rank != root:
        mine, tensors = allocate_tensors(outline)
    broadcast_tensors(tensors, src, group)
    if group.rank != root:
        optimizer.load_state_dict(mine)
        undo_casts(optimizer, mine["state"])
        return
    optimizer.defaults.setdefault("differentiable", False)  # as torch's load_state_dict does on the others
    if isinstance(optimizer, HasOwnState):
        optimizer.forget_own_state()


def undo_casts(optimizer: torch.optim.Optimizer, sent: dict[Any, Any]) -> None:
    """Put back what `load_state_dict` has cast to its parameter's dtype: float32 state of bfloat16, say.

    What has come by a message or from a file lies in the order of its elements: let it lie as parameters do.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, entries in sent.items():
        if not isinstance(index, int):
            continue
        loaded = optimizer.state[params[index]]
        for key, value in entries.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
    lay_out_state(optimizer)


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy the state that has a number for each element of a parameter to where it lies as this one does.

    Fused optimizers walk a parameter, its gradient and its state in the order of memory, whatever their
    strides. A state that has come by a message or from a file lies in the order of its elements, and a
    parameter that is channels last or transposed does not: elements would be updated with the momentum of
    others.
    """
    for param, entries in optimizer.state.items():
        if not isinstance(param, Tensor) or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            if type(value) is Tensor and value.dim() > 1 and value.shape == param.shape:
                entries[key] = laid_out(value, param)
