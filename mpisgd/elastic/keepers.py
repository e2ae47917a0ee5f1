"""How what a `State` holds is kept, put back, and made alike on all ranks: one keeper for each value."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mpisgd.accelerator.host_copy import copy_tree
from mpisgd.collectives.objects import broadcast_object
from mpisgd.optim.broadcast import broadcast_optimizer_state, broadcast_parameters
from mpisgd.optim.distributed import DistributedOptimizer

__all__ = ["Keeper", "Plain", "keeper_for"]


class Keeper(Protocol):
    """Looks after one value of a state.

    Attributes:
        value: what the state's attribute is.
    """

    value: Any

    def save(self, into: Any) -> Any:
        """Return a copy of the value as it is, in the memory of an older one where that fits."""

    def restore(self, saved: Any) -> None:
        """Put the value back to what it was when `saved` was made; `saved` may be used again."""

    def reset(self) -> None:
        """Adapt the value to the ranks that there are now."""

    def sync(self) -> None:
        """Make the value that of rank 0. Collective."""


class Plain:
    """Of anything that can be copied and pickled: numbers, lists, tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self, into: Any) -> Any:
        """Return a deep copy."""
        return copy_tree(self.value, into)

    def restore(self, saved: Any) -> None:
        """Take a copy of the copy."""
        self.value = copy_tree(saved)

    def reset(self) -> None:
        """Nothing depends on the ranks."""

    def sync(self) -> None:
        """Take rank 0's value."""
        self.value = broadcast_object(self.value)


class _StateDict:
    """Of whatever has `state_dict()` and `load_state_dict()`: schedulers, scalers, samplers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self, into: Any) -> Any:
        return copy_tree(self.value.state_dict(), into)

    def restore(self, saved: Any) -> None:
        self.value.load_state_dict(copy_tree(saved))  # what is loaded may become part of the value

    def reset(self) -> None:
        if callable(reset := getattr(self.value, "reset", None)):
            reset()

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class _Module(_StateDict):
    def restore(self, saved: Any) -> None:
        self.value.load_state_dict(saved)  # copies

    def reset(self) -> None:
        pass

    def sync(self) -> None:
        broadcast_parameters(self.value)


class _Optimizer(_StateDict):
    def reset(self) -> None:
        if isinstance(self.value, DistributedOptimizer) and self.value.spans_job:
            self.value.rebuild()  # one with a group of its own waits for a callback to give it a new one

    def sync(self) -> None:
        broadcast_optimizer_state(self.value)


def keeper_for(value: Any) -> Keeper:
    """Return what looks after a value of this kind."""
    kinds: list[tuple[type, Callable[[Any], Keeper]]] = [
        (torch.nn.Module, _Module),
        (torch.optim.Optimizer, _Optimizer),
    ]
    for kind, keeper in kinds:
        if isinstance(value, kind):
            return keeper(value)
    has_both = callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )
    return _StateDict(value) if has_both else Plain(value)
