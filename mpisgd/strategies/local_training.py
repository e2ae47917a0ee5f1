"""`LocalSynchronizer`: what strategies have in common whose ranks take steps by themselves."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.strategies.local_scaling import LocalScaling
from mpisgd.strategies.strategy import Synchronizer
from mpisgd.strategies.training import Training

__all__ = ["LocalSynchronizer"]

STRATEGY = "strategy"  # the entry of a state_dict


class LocalSynchronizer(Synchronizer, abc.ABC):
    """Counts steps, notes what the parameters are before the first one, and saves what the strategy keeps.

    Attributes:
        steps: how many this rank has taken, those before a state was saved included.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.steps = 0
        self._begins = True
        self._scaling = LocalScaling(training.optimizer)

    @abc.abstractmethod
    def begin(self) -> None:
        """Take the parameters as they are, alike on all ranks: before the first step."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Do what is due after step number `self.steps`; without autograd."""

    @abc.abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Return what the strategy keeps on this rank."""

    @abc.abstractmethod
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `own_state` has returned."""

    @abc.abstractmethod
    def reopen(self) -> None:
        """Take over the ranks and parameters that `training` has now. Collective."""

    def before_step(self) -> None:
        """Begin, at the first step; programs make the parameters equal after the optimizer was made.

        A step that a GradScaler would leave out changes nothing; the other ranks may wait in it.
        """
        self._scaling.before_step(self.training.optimizer)
        if self._begins:
            self._begins = False
            with torch.no_grad():
                self.begin()

    def after_step(self, num_steps: int) -> None:
        """See `synchronize`."""
        self._scaling.after_step()
        self.steps += 1
        with torch.no_grad():
            self.synchronize()

    def state_tensors(self) -> list[Tensor]:
        """Return the optimizer's state of each parameter that has an element for each of its elements."""
        state = self.training.optimizer.state
        return [
            value
            for _, param in self.training.named
            for _, value in sorted(state.get(param, {}).items())
            if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point()
        ]

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state, and what the strategy keeps."""
        kept = {"of": type(self).__name__, "steps": self.steps, "begins": self._begins}
        return {**make(), STRATEGY: {**kept, **self.own_state()}}

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was saved; from one of another strategy the parameters count, as they are."""
        state = state_dict.get(STRATEGY)
        if state is None or state["of"] != type(self).__name__:
            self._begins = True
            return
        self.steps, self._begins = state["steps"], state["begins"]
        if not self._begins:
            with torch.no_grad():
                self.load_own_state(state)

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Train further parameters, which all ranks have added alike. Collective."""
        super().extend(named)
        self.reopen()

    def move_to(self, group: Group) -> None:
        """Go on with other ranks, which all have the same parameters. Collective over `group`."""
        super().move_to(group)
        self._begins = True
        self.reopen()
