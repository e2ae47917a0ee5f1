"""What a timeline tells of gradients that travel together: whose they are."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["contents"]

MOST_NAMES = 5


def contents(named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the arguments of an event: the first few parameters with their bytes, and how many there are.

    Args:
        named: all of them, with names, in the order in which they travel.
    """
    listed = list(named)
    shown = {name: param.nbytes for name, param in listed[:MOST_NAMES]}
    return {"parameters": shown, "num_parameters": len(listed)}
