"""`ShardedGradient`: what stands for a gradient that is divided among ranks.

None would say that there is no gradient, and a program that computes a norm over all of them, or scales them,
would get another result on each rank without a word. This one has a shape and a dtype, an error for whoever
wants its values, and does what `torch.amp.GradScaler` asks of gradients.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["UNSCALE", "ShardedGradient", "Unscale"]

UNSCALE = "unscale"  # its name for ranks without data

# Multiplies parts of gradients by the last argument, and notes in the one before whether some are not finite.
Unscale = Callable[[Sequence["ShardedGradient"], Tensor, Tensor], None]


class ShardedGradient(Tensor):
    """The gradient of a parameter of which each rank has its pieces; it has no values of its own.

    Raises:
        InvalidArgument: whenever it is computed with; names the parameter and says what to do.
    """

    param_name: str
    _unscale: "weakref.ref[Unscale]"

    @staticmethod
    def __new__(cls, param: Tensor, name: str, unscale: "weakref.ref[Unscale]") -> "ShardedGradient":
        """Make one of the shape of `param`."""
        sharded: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        sharded.param_name = name
        sharded._unscale = unscale
        return sharded

    def __init__(self, param: Tensor, name: str, unscale: "weakref.ref[Unscale]") -> None:
        """Do nothing: `__new__` has set all attributes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Unscale the pieces of all ranks; refuse whatever else is asked."""
        first = _first_of(args)
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            unscale = first._unscale()
            assert unscale is not None, "a gradient that outlives its optimizer"
            return unscale(*args)
        raise InvalidArgument(first.why)

    @property
    def why(self) -> str:
        """Why it has no values, and what to do."""
        return (
            f"the gradient of {self.param_name} is divided among the ranks that update its parts. Clip by "
            "optimizer.clip_grad_norm_(), reset by optimizer.zero_grad() before the next backward(), and "
            "accumulate inside optimizer.no_sync()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say why it has no values."""
        return f"ShardedGradient({list(self.shape)}, {self.dtype}: {self.why})"


def _first_of(args: Any) -> ShardedGradient:
    """Return the first that stands among the arguments, however deep: some operations take lists."""
    for arg in args:
        if isinstance(arg, ShardedGradient):
            return arg
        if isinstance(arg, (list, tuple)) and any(isinstance(inner, ShardedGradient) for inner in arg):
            return _first_of(arg)
    raise AssertionError("no sharded gradient among the arguments")
