"""States of optimizers that are loaded in parts: what torch's own `load_state_dict` does to them is known."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.optim.wrapped_class import wrapped_class
from mpisgd.sharding.needed_parts import LEAST_BYTES, LoadedPart

__all__ = ["by_place", "loads_as_torch", "saves_as_torch", "without_large"]


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a wrapped optimizer loads a state as torch's do, and the program does nothing to it.

    Others may look at all of it.
    """
    wrapped = wrapped_class(type(optimizer))
    hooks = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    takes_it = next(cls for cls in wrapped.__mro__ if "__setstate__" in vars(cls))
    return (
        wrapped.load_state_dict is torch.optim.Optimizer.load_state_dict
        and takes_it.__module__.startswith("torch.optim")
        and not any(hooks)
    )


def saves_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a wrapped optimizer makes its state as torch's do, and the program leaves it alone."""
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return wrapped_class(type(optimizer)).state_dict is torch.optim.Optimizer.state_dict and not any(hooks)


def by_place(state_dict: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the states of parameters in an optimizer's state, by the places of these in the groups."""
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    for place, index in enumerate(saved):
        if index in state_dict["state"]:
            yield place, state_dict["state"][index]


def without_large(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without the tensors that may be divided among ranks."""
    small = {
        index: {key: value for key, value in entries.items() if not _is_large(value)}
        if isinstance(entries, dict)
        else entries
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": small}


def _is_large(value: Any) -> bool:
    return isinstance(value, LoadedPart) or (isinstance(value, Tensor) and value.nbytes >= LEAST_BYTES)
