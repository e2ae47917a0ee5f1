"""`Fragment`: some parameters of `DiLoCo`, which are synchronised together, and what is kept of all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.compression_state import CompressionState
from mpisgd.method_state import COPY, alike, part
from mpisgd.methods.diloco.outer import OuterChoice, OuterOptimizer
from mpisgd.methods.strategy.example_counts import ExampleCounts
from mpisgd.methods.strategy.kept_tensors import follow
from mpisgd.methods.strategy.tensor_mean import TensorMean
from mpisgd.methods.strategy.training import Training

__all__ = ["Fragment", "Rhythm", "State"]


class Rhythm(NamedTuple):
    """When a fragment is synchronised, and how; see `DiLoCo`."""

    sync_every: int
    overlap_steps: int
    overlap_alpha: float


@dataclass
class State:
    """What is kept from step to step; all ranks take the same outer steps.

    Attributes:
        waves: how many times parameters had been added before, by parameter. Those of a wave are cut into
            fragments together.
        outer: the parameters after the last outer step, at first where all ranks begin.
        entries: the outer optimizer's state, by parameter.
        options: of its groups, by fragment.
        kind: its class: the state of another one is none of its own.
        changes: the mean of the changes that is due and was not applied yet, by parameter.
        examples: what each rank has stepped with.
        compression: what compressors keep of the changes.
    """

    waves: dict[str, int] = alike(default_factory=dict)
    outer: dict[str, Tensor] = alike(default_factory=dict, begin=COPY)
    entries: dict[str, dict[str, Any]] = alike(default_factory=dict)
    options: dict[str, dict[str, Any]] = alike(default_factory=dict)
    kind: str = alike("")
    changes: dict[str, Tensor] = alike(default_factory=dict)
    examples: ExampleCounts = part(ExampleCounts)
    compression: CompressionState = part(CompressionState)


class Fragment:
    """Some parameters, and the outer optimizer of them.

    Args:
        number: of all fragments.
        params: of this rank, by key.
        first: the first step after which they are synchronised.
        state: of all parameters.
        training: its group and options.
        rhythm: see there.
        choice: the outer optimizer.
    """

    def __init__(
        self,
        number: int,
        params: Mapping[str, Tensor],
        first: int,
        state: State,
        training: Training,
        rhythm: Rhythm,
        choice: OuterChoice,
    ) -> None:
        self._keys, self._first, self._rhythm, self._state = list(params), first, rhythm, state
        self._options = state.options  # a state that is loaded has others, which this fragment leaves alone
        self._group = training.group
        self._mean = TensorMean(params, training.group, training.options, state.compression)
        self._number = str(number)
        self._outer = OuterOptimizer(
            choice,
            {key: state.outer[key] for key in self._keys},
            state.entries,
            state.options.get(self._number, {}),
        )
        self._wait: Callable[[], None] = lambda: None  # for what is on its way

    def note_options(self) -> None:
        """Put the options of the outer optimizer, which some change by themselves, into the state."""
        self._options[self._number] = self._outer.options

    def is_due(self, step: int) -> bool:
        """Return whether anything is to be done after a step."""
        phase = (step - self._first) % self._rhythm.sync_every
        return phase in (0, self._rhythm.overlap_steps)

    def after(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Do what is due after a step. Collective where anything is.

        Args:
            step: its number.
            params: of this rank, all of them.
        """
        since, rhythm, changes = step - self._first, self._rhythm, self._state.changes
        mine = {key: params[key] for key in self._keys}
        if any(key in changes for key in self._keys) and since % rhythm.sync_every == rhythm.overlap_steps:
            self._finish(mine)
        if since >= 0 and since % rhythm.sync_every == 0:
            outer = self._outer.like(mine)
            begun = torch._foreach_sub(list(outer.values()), list(mine.values()))
            changes.update(zip(self._keys, begun, strict=True))
            counts = self._state.examples.of_mean(self._number, self._group)
            self._wait = self._mean.start(begun, counts, async_op=rhythm.overlap_steps > 0)
            if not rhythm.overlap_steps:
                self._finish(mine)

    def arrive(self) -> None:
        """Return when what is on its way has arrived; what fails is raised once."""
        wait, self._wait = self._wait, lambda: None
        wait()

    def _finish(self, mine: Mapping[str, Tensor]) -> None:
        """Take the outer step, and go on from there.

        A state that was saved with other fragments may have changes of some of the parameters only.
        """
        self.arrive()
        outer, state = self._outer.like(mine), self._state
        changes = {key: state.changes.pop(key) for key in self._keys if key in state.changes}
        follow(list(changes.values()), [mine[key] for key in changes], "DiLoCo")
        self._outer.step(changes)
        params, new = [mine[key] for key in changes], [outer[key] for key in changes]
        alpha = self._rhythm.overlap_alpha if self._rhythm.overlap_steps else 0.0
        if alpha:
            torch._foreach_lerp_(params, new, 1 - alpha)
        else:
            torch._foreach_copy_(params, new)
