"""`AbsentGradient`: what stands for a gradient that only another rank of the host has.

None would say that there is no gradient, and a program that computes a norm over all of them, or scales them,
would get another result on each rank without a word. This one has a shape and a dtype, and an error for
whoever wants its values.
"""

from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["AbsentGradient"]


class AbsentGradient(Tensor):
    """The gradient of a parameter that another rank updates; it has no values.

    Raises:
        InvalidArgument: whenever it is computed with; names the parameter and its owner.
    """

    why: str

    @staticmethod
    def __new__(cls, param: Tensor, why: str) -> "AbsentGradient":
        """Make one of the shape of `param`; `why` it is not here is part of the error."""
        absent: AbsentGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        absent.why = why
        return absent

    def __init__(self, param: Tensor, why: str) -> None:
        """See `__new__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse, whatever is asked."""
        raise InvalidArgument(_first_of(args).why)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say why it is not here."""
        return f"AbsentGradient({list(self.shape)}, {self.dtype}: {self.why})"


def _first_of(args: Any) -> AbsentGradient:
    """Return the first that stands among the arguments, however deep: some operations take lists."""
    for arg in args:
        if isinstance(arg, AbsentGradient):
            return arg
        if isinstance(arg, (list, tuple)) and any(isinstance(inner, AbsentGradient) for inner in arg):
            return _first_of(arg)
    raise AssertionError("no absent gradient among the arguments")
