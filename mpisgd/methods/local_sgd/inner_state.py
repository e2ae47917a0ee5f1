"""The wrapped optimizers' state, of ranks that have not all got it: a parameter may be unused on some."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.sharding.piece import is_elementwise_entry

__all__ = ["complete_states"]


def complete_states(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return the state that has an element for each of a parameter, the same of all ranks. Collective.

    Args:
        optimizer: where a rank has no state of a parameter and another one has, it is given one: zeros, and
            what is no such tensor, as a count of steps is, as the first rank has it that has any. Where the
            ranks have an entry in several dtypes, all get it in the one that these promote to.
        params: its parameters.
        group: the ranks.
    """
    mine = [_outline(optimizer.state.get(param, {}), param) for param in params]
    told: list[Any] = [None] * group.size
    all_gather_object(told, mine, group)
    for place, param in enumerate(params):
        outlines: list[dict[str, Any]] = [of_one[place] for of_one in told if of_one[place]]
        if not outlines:
            continue
        state = optimizer.state[param]
        if not mine[place]:
            state.update({name: _made(entry, param) for name, entry in outlines[0].items()})
        for name, dtype in _common_dtypes(outlines).items():
            if _is_elementwise(name, state.get(name), param):
                state[name] = state[name].to(dtype)
    return [
        value
        for param in params
        for name, value in sorted(optimizer.state.get(param, {}).items())
        if _is_elementwise(name, value, param)
    ]


def _is_elementwise(name: str, value: Any, param: Tensor) -> bool:
    """Return whether an entry is averaged; a count of steps of a parameter without dimensions is not."""
    return is_elementwise_entry(name, value, param.shape) and bool(value.is_floating_point())


def _outline(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return an outline of a state, to make one: a dtype for what is averaged, the rest as it is."""
    return {
        name: value.dtype if _is_elementwise(name, value, param) else value for name, value in state.items()
    }


def _made(entry: Any, param: Tensor) -> Any:
    return torch.zeros_like(param, dtype=entry) if isinstance(entry, torch.dtype) else entry


def _common_dtypes(outlines: Sequence[dict[str, Any]]) -> dict[str, torch.dtype]:
    """Return a dtype for each entry that is averaged, the same on all ranks.

    They differ where some ranks have loaded the state: torch casts what it loads to the dtype of its
    parameter, also where the optimizer keeps float32 of parameters of less precision.
    """
    dtypes: dict[str, torch.dtype] = {}
    for outline in outlines:
        for name, entry in outline.items():
            if isinstance(entry, torch.dtype):
                dtypes[name] = torch.promote_types(dtypes.get(name, entry), entry)
    return dtypes
