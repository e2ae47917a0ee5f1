"""How much an optimizer has to do for a parameter that it must update as a whole.

Muon orthogonalizes matrices. For one of [A, B] with A <= B each Newton-Schulz step multiplies A A B numbers
in each of its two products with the matrix: of matrices with as many elements, one that is nearer to a square
takes more. So owners get parameters by their work, and not by their bytes.

An optimizer of a user's own declares it by a method:

    def whole_update_work(self, param, options):
        '''Return the work of updating a parameter as a whole; None: each element is updated by itself.'''
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["UpdateWork", "check_not_whole", "declares_work", "is_muon", "matrix_work", "work_of"]

UpdateWork = Callable[[Tensor, Mapping[str, Any]], float | None]

# torch's own that look at more than an element and its state, by name: older versions of torch lack some.
WHOLE = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, name)
)


def matrix_work(shape: torch.Size, steps: int) -> float:
    """Return the multiplications of so many Newton-Schulz steps, in units of an elementwise update.

    A step has the products X Xᵀ and (...) X of A A B each, and a square of A A A.

    Args:
        shape: of a matrix.
        steps: how many there are.
    """
    short, long = sorted(shape)
    return float(steps * short * short * (2 * long + short) + short * long)


def is_muon(kind: Any) -> bool:
    """Return whether something is torch's Muon, or a class that is derived from it."""
    return hasattr(torch.optim, "Muon") and isinstance(kind, type) and issubclass(kind, torch.optim.Muon)


def declares_work(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer says by itself which parameters it updates as a whole."""
    return callable(getattr(optimizer, "whole_update_work", None))


def work_of(optimizer: torch.optim.Optimizer) -> UpdateWork:
    """Return a function that tells the work of a parameter's update as a whole; None: that is not known."""
    if declares_work(optimizer):
        declared: UpdateWork = optimizer.whole_update_work  # type: ignore[attr-defined]
        return declared
    if is_muon(type(optimizer)):
        return lambda param, options: matrix_work(param.shape, options["ns_steps"])
    return lambda param, options: None


def check_not_whole(optimizer: torch.optim.Optimizer) -> None:
    """Raise where a program says of an optimizer that it updates each element by itself, and it does not.

    Raises:
        InvalidArgument: names the optimizer.
    """
    if isinstance(optimizer, WHOLE) or declares_work(optimizer):
        kinds = (cls for cls in type(optimizer).__mro__ if cls in WHOLE or "whole_update_work" in vars(cls))
        kind = next(kinds).__name__
        raise InvalidArgument(
            f"DistributedOptimizer: elementwise=True with {kind}, whose update of an element depends on "
            "others of the parameter; leave elementwise out, and each rank updates whole parameters"
        )
