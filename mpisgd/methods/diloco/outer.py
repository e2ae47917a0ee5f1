"""The outer optimizer: which one is asked for, and that of some parameters, with the state that is kept."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.methods.strategy.kept_tensors import follow

__all__ = ["OuterChoice", "OuterOptimizer"]


class OuterChoice(NamedTuple):
    """What is asked for.

    Attributes:
        make: returns the outer optimizer of some tensors.
        chosen: its arguments, defaults included.
        kind: the name of its class: the state of another one is none of its own.
    """

    make: Callable[[list[Tensor]], torch.optim.Optimizer]
    chosen: Mapping[str, Any]
    kind: str


class OuterOptimizer:
    """Steps along mean changes of parameters.

    Args:
        choice: which one.
        outer: the outer parameters, by key; changed in place by each step.
        entries: its state, by key of the parameter; what is there already is taken over.
        options: of its group, which some optimizers change by themselves.

    Attributes:
        entries: as given, and kept up to date.
    """

    def __init__(
        self,
        choice: OuterChoice,
        outer: Mapping[str, Tensor],
        entries: dict[str, dict[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        self._outer, self.entries = outer, entries
        self._optimizer = choice.make(list(outer.values()))
        (group,) = self._optimizer.param_groups
        group.update({name: value for name, value in options.items() if name not in choice.chosen})
        for key, param in outer.items():
            if entries.get(key):
                self._optimizer.state[param] = entries[key]
            entries[key] = self._optimizer.state[param]

    @property
    def options(self) -> dict[str, Any]:
        """The options of its group."""
        (group,) = self._optimizer.param_groups
        return {name: value for name, value in group.items() if name != "params"}

    def like(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the outer parameters, of the dtypes that the parameters have now."""
        outer = self._outer
        if follow(list(outer.values()), [params[key] for key in outer], "DiLoCo"):
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # which casts its state, too
            for key, param in outer.items():
                self.entries[key] = self._optimizer.state[param]
        return outer

    def step(self, changes: Mapping[str, Tensor]) -> None:
        """Take a step along the changes of some of the parameters."""
        for key, change in changes.items():
            self._outer[key].grad = change
        self._optimizer.step()
        self._optimizer.zero_grad()
