"""An optimizer that works on other parameters for a while: on those of a shard, or on zeros."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.methods.parameter_server.layout import PARAMETER, Schema
from mpisgd.sharding.elementwise import single_step

__all__ = ["schemas_of", "standing_in"]


@contextmanager
def standing_in(
    optimizer: torch.optim.Optimizer, params: Sequence[list[Any]], state: defaultdict[Any, Any]
) -> Iterator[None]:
    """Let the optimizer have other parameters and another state meanwhile."""
    before = [options["params"] for options in optimizer.param_groups], optimizer.state
    try:
        for options, others in zip(optimizer.param_groups, params, strict=True):
            options["params"] = others
        optimizer.state = state
        yield
    finally:
        for options, own in zip(optimizer.param_groups, before[0], strict=True):
            options["params"] = own
        optimizer.state = before[1]


@torch.no_grad()
def schemas_of(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Schema]:
    """Return the tensors that the state of each parameter has: found out by a step on zeros.

    Raises:
        InvalidArgument: the optimizer keeps something else than tensors for a parameter.
    """
    stand_ins = {param: torch.nn.Parameter(torch.zeros(param.shape, dtype=param.dtype)) for param in params}
    state: defaultdict[Any, Any] = defaultdict(dict)
    for param, stand_in in stand_ins.items():
        stand_in.grad = torch.zeros_like(stand_in)
        if param in optimizer.state:
            state[stand_in] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in optimizer.state[param].items()
            }
    groups = [[stand_ins[param] for param in options["params"]] for options in optimizer.param_groups]
    with standing_in(optimizer, groups, state):
        single_step(optimizer)(optimizer)
    return [_schema(optimizer, param, state[stand_in]) for param, stand_in in stand_ins.items()]


def _schema(optimizer: torch.optim.Optimizer, param: Tensor, state: dict[str, Any]) -> Schema:
    for key, value in state.items():
        if value is not None and (not isinstance(value, Tensor) or not value.is_cpu):
            raise InvalidArgument(
                f"ParameterServer: {type(optimizer).__name__} keeps {key!r} of a parameter as a "
                f"{type(value).__name__}; the servers keep tensors on the CPU"
            )
    tensors = {key: value for key, value in state.items() if value is not None}
    found = {PARAMETER: param, **dict(sorted(tensors.items()))}
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in found.items()}
