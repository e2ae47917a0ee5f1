"""`Part`: what one optimizer of a program has, on all ranks that train in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mpisgd.methods.paper_kit import Vec
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.training import Training
from mpisgd.tools.verification.shares import Place

__all__ = ["Part", "Stepping"]


class Part:
    """What one of the program's optimizers has, on all ranks that train.

    Attributes:
        place: of the optimizer.
        params: by rank and name.
        optimizers: what a paper calls the optimizer, by rank.
        places: of the parameters in memory, by name.
    """

    def __init__(self, place: int, here: Sequence[tuple[int, Training]]) -> None:
        self.place = place
        self.params = {rank: _names(training, place) for rank, training in here}
        self.optimizers: dict[int, Any] = {rank: Stepping(training, place) for rank, training in here}
        self.places: dict[str, Place] = {}
        self._note_places(here, 0)

    def note_groups(self, here: Sequence[tuple[int, Training]]) -> None:
        """Take over parameters that were added."""
        for rank, training in here:
            self.params[rank].update(_names(training, self.place))
        self._note_places(here, 1 + max(place.memory for place in self.places.values()))

    def note_reload(self) -> None:
        """Note that the optimizer is made over all parameters at once."""
        self.places.update({name: place._replace(memory=0) for name, place in self.places.items()})

    def _note_places(self, here: Sequence[tuple[int, Training]], memory: int) -> None:
        rank, training = here[0]
        name_of = {id(param): name for name, param in self.params[rank].items()}
        for group, options in enumerate(training.groups_of(self.place)):
            for param in options["params"]:
                self.places.setdefault(name_of[id(param)], Place(memory, group))

    def grads(self) -> dict[int, dict[str, Tensor]]:
        """Return the gradients that there are."""
        return {
            rank: {name: param.grad for name, param in params.items() if param.grad is not None}
            for rank, params in self.params.items()
        }

    def give(self, grads: dict[int, dict[str, Tensor]]) -> None:
        """Give ranks the gradients back that they did not step with."""
        for rank, mine in grads.items():
            for name, grad in mine.items():
                self.params[rank][name].grad = grad

    def copies(self) -> dict[int, Vec]:
        """Return copies of the parameters."""
        return {
            rank: Vec({name: param.detach().clone() for name, param in params.items()})
            for rank, params in self.params.items()
        }


class Stepping:
    """What a paper calls the optimizer: a step of one in a training, as the program asks for it."""

    def __init__(self, training: Training, place: int) -> None:
        self._training, self._place = training, place
        self.event = events.Step()
        self.rests = False  # it has no data, and no gradients but those of others

    def step(self) -> None:
        """Update the parameters by the gradients that they have."""
        params = self._training.params_of(self._place)
        if not self.rests or any(param.grad is not None for param in params):
            self._training.step(self.event, [self._place])

    @property
    def state(self) -> dict[Tensor, Any]:
        """What the optimizer keeps, by parameter."""
        state: dict[Tensor, Any] = self._training.optimizers[self._place].state
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the training keeps its state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def _names(training: Training, place: int) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer by name, in its order."""
    name_of = {id(param): f"layers.{layer}" for layer, param in enumerate(training.model.params)}
    return {name_of[id(param)]: param for param in training.params_of(place)}
