"""How many bytes an optimizer keeps for each parameter, found out without any memory for it.

The optimizer's own step is done on parameters without values (torch's device "meta"), and what it keeps
afterwards is counted: so the answer holds for any optimizer that can be run there.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.optim.distributed import DistributedOptimizer, wrapped_class

__all__ = ["OptimizerLike", "state_bytes"]

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def state_bytes(
    optimizer: OptimizerLike, params: list[Tensor], dtype_of: Mapping[torch.dtype, torch.dtype]
) -> list[int]:
    """Return the bytes that the optimizer keeps for each of `params` after a step.

    Args:
        optimizer: over these parameters, which is unchanged; or what makes one, such as its class.
        params: all of them.
        dtype_of: the dtype in which parameters of a dtype are updated, where it is another one.

    Raises:
        InvalidArgument: its step cannot be done without values.
    """
    if not params:
        return []
    blanks = [_blank(param, dtype_of.get(param.dtype, param.dtype)) for param in params]
    try:
        twin = _twin(optimizer, params, blanks)
        twin.step()
    except Exception as exc:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise InvalidArgument(
            f"estimate_memory: a step of {name} cannot be done without values ({exc}); pass "
            "state_per_parameter, the bytes that it keeps for each parameter"
        ) from exc
    return [sum(_nbytes(value) for value in twin.state.get(blank, {}).values()) for blank in blanks]


def _blank(param: Tensor, dtype: torch.dtype) -> Tensor:
    blank = torch.nn.Parameter(torch.empty(param.shape, dtype=dtype, device="meta"))
    blank.grad = torch.empty_like(blank)
    return blank


def _twin(optimizer: OptimizerLike, params: list[Tensor], blanks: list[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind and options over parameters without values."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer(blanks)
    blank_of = dict(zip(map(id, params), blanks, strict=True))
    kind = type(optimizer)
    twin = object.__new__(wrapped_class(kind) if issubclass(kind, DistributedOptimizer) else kind)
    twin.__dict__.update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [blank_of[id(p)] for p in group["params"] if id(p) in blank_of]}
        for group in optimizer.param_groups
    ]
    for name in [name for name in vars(twin) if name.endswith("_hooks")]:
        setattr(twin, name, OrderedDict())
    return twin


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
