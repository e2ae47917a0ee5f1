"""The `state_dict` of a model, saved by one rank, and loaded, where each rank needs its own parts only."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.core.group import Group
from mpisgd.sharding.layerwise.in_files import streamed_parameters_of
from mpisgd.sharding.layerwise.offload_parameters import StateDictHooks
from mpisgd.sharding.needed_parts import LoadedPart, NeededPart
from mpisgd.sharding.shared_parameters import needed_of_shared

__all__ = ["load_parts", "needed_parts_of", "state_dict_at", "tensors_of"]

EXTRA = "_extra_state"  # torch's name for what a module keeps besides tensors


def state_dict_at(model: nn.Module, root: int, group: Group) -> dict[str, Any]:
    """Return `model.state_dict()` on the rank that saves it. Collective where parameters are in files.

    The others get what is in files without its values, where the program does nothing with them.

    Args:
        model: of any kind.
        root: the rank of `group` that saves it.
        group: the ranks that call this.
    """
    streamed = streamed_parameters_of(list(model.parameters()))
    if streamed is None or group.size == 1 or streamed.group.ranks != group.ranks:
        return model.state_dict()
    looks = torch.tensor([group.rank != root and not _is_torchs(model, SAVING)], dtype=torch.uint8)
    if any(streamed.on_some_rank(looks)):
        return model.state_dict()
    with streamed.values_at(root):
        return model.state_dict()


def needed_parts_of(model: nn.Module, group: Group) -> dict[str, NeededPart] | None:
    """Return the parts that this rank needs of a model's `state_dict`, by name; None: all of it.

    Of parameters in files that is what lies in this rank's; of those of which a host has one copy everything
    on its first rank, and nothing on the others. What is not in the result all ranks need.

    Args:
        model: of any kind.
        group: the ranks that load it.
    """
    params = list(model.parameters())
    if not _is_torchs(model, LOADING):
        return None
    streamed = streamed_parameters_of(params)
    if streamed is None:
        needed = needed_of_shared(params, group)
    else:
        needed = streamed.needed_parts() if streamed.group.ranks == group.ranks else {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: needed[param] for name, param in named if param in needed} or None


# What a module does to its state: the method for all modules, the one for itself, and the hooks of both.
LOADING = (
    "load_state_dict",
    "_load_from_state_dict",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
SAVING = ("state_dict", "_save_to_state_dict", "_state_dict_pre_hooks", "_state_dict_hooks")


def _is_torchs(model: nn.Module, names: tuple[str, str, str, str]) -> bool:
    """Return whether all modules do as torch's do, and the program does nothing to the state."""
    of_all, of_one, *hooks = names
    return all(
        getattr(type(module), of_all) is getattr(nn.Module, of_all)
        and str(getattr(type(module), of_one).__module__).startswith("torch.nn.")
        and all(_is_ours(hook) for each in hooks for hook in getattr(module, each).values())
        for module in model.modules()
    )


def _is_ours(hook: Any) -> bool:
    called = getattr(hook, "hook", hook)
    owner = getattr(called.func, "__self__", None) if isinstance(called, partial) else None
    return isinstance(owner, StateDictHooks)


def tensors_of(model: nn.Module, needed: Mapping[str, NeededPart]) -> dict[str, Any]:
    """As `model.state_dict()`; parameters in files have their shapes and no memory."""
    if streamed_parameters_of(list(model.parameters())) is None:
        return model.state_dict()
    found: dict[str, Any] = {name: torch.empty(()).expand(part.layout.shape) for name, part in needed.items()}
    return {**found, **{name: getattr(module, key, None) for name, module, key in _others(model)}}


@torch.no_grad()
def load_parts(model: nn.Module, state: Mapping[str, Any], needed: Mapping[str, NeededPart]) -> None:
    """Load a `state_dict` that has of each parameter what this rank needs. Collective.

    Of parameters in shared memory the others have the values when all ranks have come back from here.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    streamed = streamed_parameters_of(list(model.parameters()))
    if streamed is not None:
        streamed.load_parts({param: state[name] for name, param in named})
    else:
        for name, param in named:
            _load_into(param, state[name], needed.get(name))
    for name, module, key in _others(model):
        if key == EXTRA:
            module.set_extra_state(state[name])
        else:
            getattr(module, key).copy_(state[name])


def _load_into(param: Tensor, value: LoadedPart | Tensor, needed: NeededPart | None) -> None:
    """Write to a parameter in memory, unless another rank does so."""
    if needed is None or needed.runs:
        param.copy_(value.whole() if isinstance(value, LoadedPart) else value)
    else:
        torch.autograd.graph.increment_version(param)


def _others(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield what else is in a model's state: its name there, the module, and its name in this one."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for key, value in module._buffers.items():
            if value is not None and key not in module._non_persistent_buffers_set:
                yield start + key, module, key
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield start + EXTRA, module, EXTRA
