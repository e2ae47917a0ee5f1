"""Horovod's reductions, by its numbers."""

import warnings

import torch

from mpisgd.arguments import check_flag, shown
from mpisgd.errors import UnsupportedOp

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "name_of", "reduction_for"]

Average, Sum, Adasum, Min, Max, Product = range(6)
NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def name_of(op: int) -> str:
    """Return the name of a reduction.

    Raises:
        ValueError: there is none of this number.
    """
    if not isinstance(op, int) or not 0 <= op < len(NAMES):
        raise ValueError(f"op={shown(op)}: expected one of hvd.{', hvd.'.join(NAMES)}")
    return NAMES[op]


def reduction_for(op: int | None, average: bool | None, dtype: torch.dtype) -> str:
    """Return the name of the reduction that `op` and the older `average` ask for together.

    Raises:
        ValueError: both are given.
        UnsupportedOp: the dtype does not have it.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        check_flag("hvd", "average", average)
        warnings.warn(
            "Parameter `average` has been replaced with `op`: hvd.Average or hvd.Sum.", DeprecationWarning, 3
        )
        op = Average if average else Sum
    name = name_of(Average if op is None else op)
    if dtype is torch.bool and name in ("Average", "Adasum"):
        raise UnsupportedOp(f"{name} of bool tensors is not defined; hvd.Sum is OR, hvd.Product is AND")
    if name == "Adasum" and not dtype.is_floating_point:
        raise UnsupportedOp(f"Adasum needs a floating tensor, got {dtype}")
    return name
