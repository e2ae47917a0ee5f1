"""`average_states`: what optimizers keep of each element becomes its mean, for all ranks in one process."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Vec, weighted

__all__ = ["average_states"]

OF_NO_ELEMENT = ("step", "eta", "mu", "mu_product")  # one number of a parameter, which may have no dimensions


def average_states(
    params: Mapping[int, Mapping[str, Tensor]],
    optimizers: Mapping[int, torch.optim.Optimizer],
    sum_of: Callable[[Mapping[int, Tensor]], Tensor],
    counts: Mapping[int, float],
) -> None:
    """See `World.average_state`; the rest of a state that a rank lacks is that of the first one that has it.

    Args:
        params: by rank and name.
        optimizers: by rank, of these parameters.
        sum_of: see `World.sum`.
        counts: of the ranks that take the mean.
    """
    for name, param in params[min(counts)].items():
        states = {i: optimizers[i].state.get(params[i][name]) or {} for i in counts}
        known: dict[str, Any] = next(filter(None, states.values()), {})
        zeros = {
            key: torch.zeros_like(value) for key, value in known.items() if _is_averaged(key, value, param)
        }
        kept = weighted({i: Vec({**zeros, **Vec(state).only(zeros)}) for i, state in states.items()}, counts)
        means = {key: sum_of({i: v[key] for i, v in kept.items()}) / len(kept) for key in zeros}
        for i, state in states.items():
            mine = state or copy.deepcopy(known)
            for key, value in means.items():
                mine[key] = value.to(mine[key].dtype, copy=True)
            if mine:
                optimizers[i].state[params[i][name]] = mine


def _is_averaged(key: str, value: Any, param: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == param.shape
        and value.is_floating_point()
        and key not in OF_NO_ELEMENT
    )
