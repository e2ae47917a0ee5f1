"""What is one rank's own of an optimizer: taken out of its state, and put in again.

For those who move states between ranks: checkpoints and elastic training. A broadcast leaves it out.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.method_state import ENTRY, HasOwnState

__all__ = ["copy_into_replica", "merge_own", "split_own"]


def split_own(optimizer: Any, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Divide a state into the part common to all ranks and this rank's own; nothing is copied.

    Args:
        optimizer: of any kind.
        state: its `state_dict()`.

    Returns:
        The state without it; and "own", that of the method, and where models differ by rank also "state",
        that of the wrapped optimizer, and "replica", the parameters and buffers. None: there is nothing.
    """
    if not isinstance(optimizer, HasOwnState) or ENTRY not in state:
        return state, None
    entry, replica = state[ENTRY], optimizer.replica()
    mine: dict[str, Any] = {"own": entry["own"]}
    if replica:
        mine |= {"state": state["state"], "replica": replica}
    common = {**state, ENTRY: {**entry, "own": None}}
    return common, mine if replica or entry["own"] else None


def merge_own(state: Any, mine: Mapping[str, Any] | None, rank: int, size: int) -> Any:
    """Return a state with what is a rank's own in it, as this rank has it.

    Args:
        state: of an optimizer, as `split_own` has returned it.
        mine: what it has returned beside that on this rank; None: nothing.
        rank: of this process, among those that the optimizer trains with.
        size: how many these are.
    """
    if mine is None or "own" not in mine:
        return state
    entry = {**state[ENTRY], "own": mine["own"], "rank": rank, "size": size}
    return {**state, "state": mine.get("state", state["state"]), ENTRY: entry}


@torch.no_grad()
def copy_into_replica(
    optimizer: HasOwnState, replica: Mapping[str, Tensor], only: set[int] | None = None
) -> None:
    """Overwrite parameters and buffers by those of a replica.

    Args:
        optimizer: whose.
        replica: by key.
        only: those at these addresses; None: all.
    """
    tensors = optimizer.replica(anyway=True)
    for key, value in replica.items():
        if key in tensors and (only is None or tensors[key].data_ptr() in only):
            tensors[key].copy_(value)
