"""Which parameters `offload_parameters` has moved to files; asked of every model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument

if TYPE_CHECKING:
    from mpisgd.sharding.layerwise.streamed_parameters import StreamedParameters

__all__ = ["check_in_memory", "streamed_parameters_of", "without_streamed"]


def streamed_parameters_of(params: Sequence[Tensor]) -> "StreamedParameters | None":
    """Return the object that has moved these parameters to files; None if there is none."""
    found = {getattr(param, "_mpisgd_streamed", None) for param in params}
    return found.pop() if len(found) == 1 else None


def without_streamed(name: str, named: Sequence[tuple[str, Any]], group: Group) -> list[tuple[str, Any]]:
    """Return the modules with parameters in memory: those in files are one model, which the ranks divide.

    So they are the same on all ranks of the group that they were moved with, and need not be sent or
    compared.

    Args:
        name: of the function that they were given to, for messages.
        named: parameters and other values, with names.
        group: for which they are to be the same.

    Raises:
        InvalidArgument: some are in the files of other ranks.
    """
    found = []
    for key, value in named:
        streamed = getattr(value, "_mpisgd_streamed", None)
        if streamed is None:
            found.append((key, value))
        elif not set(group.ranks) <= set(streamed.group.ranks):
            raise InvalidArgument(
                f"{name}: {key} is in the files of ranks {list(streamed.group.ranks)}, and the group has "
                f"ranks {list(group.ranks)}; pass model.state_dict(), which has the values"
            )
    return found


def check_in_memory(name: str, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise unless all parameters are in memory.

    Raises:
        InvalidArgument: `offload_parameters` has moved one to a file.
    """
    for key, param in named:
        if getattr(param, "_mpisgd_streamed", None) is not None:
            raise InvalidArgument(
                f"{name}: {key} is in a file, by mpisgd.offload_parameters; only "
                "mpisgd.DistributedOptimizer(..., strategy=mpisgd.Sharded(offload=...)) with the same "
                "offload updates it there"
            )
