"""`ParameterGuard`: tells in one call that hundreds of parameters are as they were."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ParameterGuard"]


class ParameterGuard:
    """Compares parameters with how they were when this was made, by the guards of torch's compiler.

    These look at the type, dtype, device, shape, strides and `requires_grad` of each in C++: 0.12 us, where
    the same in Python takes 0.4. torch does not promise them to be there. Without them, and where they see a
    difference that is none to us, `holds` returns False, and the caller has to look for itself.

    Args:
        params: the parameters; they are not kept.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._guards: Any = None
        if not all(param.requires_grad for param in params):
            return  # a frozen one may have a gradient, which they do not look at
        sizes, strides = [[*param.shape] for param in params], [[*param.stride()] for param in params]
        try:
            make: Any = torch._C._dynamo.guards.TensorGuards
            guards = make(*params, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self._guards = guards if guards.check(*params) else None
        except (AttributeError, TypeError, RuntimeError):
            pass

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Return whether all are known to be as they were, and all of them require gradients."""
        return self._guards is not None and bool(self._guards.check(*params))
