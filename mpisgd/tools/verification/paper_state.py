"""The state that a paper keeps, where ranks or parameters change: what stays of it, and what begins anew."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from mpisgd.method_state import LOST, OWNER, REBUILD
from mpisgd.methods.paper_kit import Vec

__all__ = ["carried_over", "converted", "names_in"]


def carried_over(state: Any, fresh: Any, was: Mapping[int, int]) -> Any:
    """Return a paper's state after ranks or parameters have changed.

    What is alike stays, and so does what is a rank's own, where it has it back; what is to be rebuilt stays
    where all ranks have their own back. Elsewhere it is fresh, and so are entries for new parameters.

    Args:
        state: as it was.
        fresh: of the ranks and parameters of now, as they would begin; None where one rank keeps nothing.
        was: which rank each one was that has its own back.
    """
    if state is None:
        return fresh
    if isinstance(state, dict):  # of a wire, by what travels together; (): as it begins
        return {names: carried_over(each, fresh[()], was) for names, each in state.items()}
    if not is_dataclass(state) or isinstance(state, type):
        return state
    kept: dict[str, Any] = {}
    for each in fields(state):
        value, anew = getattr(state, each.name), getattr(fresh, each.name, None)
        owner = each.metadata[OWNER]
        if owner == "part":
            kept[each.name] = carried_over(value, anew, was)
        elif owner != "own":
            kept[each.name] = _with_new(value, anew)
        elif each.metadata[LOST] == REBUILD and any(
            value.keys() ^ was.keys() or i != j for i, j in was.items()
        ):
            kept[each.name] = anew or {}
        else:
            begun = anew or {}
            mine = {i: _with_new(value[j], begun.get(i)) for i, j in was.items() if j in value}
            kept[each.name] = {**begun, **mine}
    return replace(state, **kept)


def converted(state: Any, dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]]) -> Any:
    """Return a state in which what had a parameter's dtype has the one that the parameter has now."""
    if is_dataclass(state) and not isinstance(state, type):
        return replace(
            state, **{each.name: converted(getattr(state, each.name), dtypes) for each in fields(state)}
        )
    if isinstance(state, Vec):
        pairs = {name: dtypes.get(name, (None, tensor.dtype)) for name, tensor in state.items()}
        return Vec({n: t.to(pairs[n][1]) if t.dtype is pairs[n][0] else t for n, t in state.items()})
    if isinstance(state, dict):
        return {key: converted(value, dtypes) for key, value in state.items()}
    return state


def names_in(state: Any) -> set[str]:
    """Return the parameters of which a paper's state has something."""
    if isinstance(state, Vec):
        return {*state}
    if is_dataclass(state) and not isinstance(state, type):
        return {name for each in fields(state) for name in names_in(getattr(state, each.name))}
    if isinstance(state, dict):
        return {name for value in state.values() for name in names_in(value)}
    return set()


def _with_new(value: Any, fresh: Any) -> Any:
    """Return a value of the state; a `Vec` gets the entries of parameters that were added since."""
    return Vec({**(fresh or {}), **value}) if isinstance(value, Vec) else value
