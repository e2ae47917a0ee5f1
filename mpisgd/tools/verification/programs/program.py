"""`Program`: a training program as data: the model, the optimizers, and the events in their order.

A program says nothing of how it is run. `execute` runs it on a rank, or in one process for the reference;
`python_text` writes it down as Python; `shrink` takes parts of it away. `repr()` of a program can be read
back by `parse`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

import mpisgd
from mpisgd.methods.catalogue import optimizers
from mpisgd.tools.verification.programs.events import Event, Join, Lose, Reload
from mpisgd.tools.verification.programs.extragradient import Extragradient
from mpisgd.tools.verification.programs.option_text import evaluated

__all__ = [
    "CLOSED",
    "ONE_BIT",
    "Layer",
    "Optimizer",
    "Program",
    "examples_of",
    "examples_of_step",
    "parse",
]

ONE_BIT = tuple(kind.__name__ for kind in optimizers())
CLOSED = ("LBFGS", Extragradient.__name__)  # need a closure, and call it several times in a step


@dataclass(frozen=True)
class Layer:
    """A parameter, and its part of the loss.

    Attributes:
        kind: "dense": multiplied by inputs. "embedding", "sparse": rows of it are looked up, and the
            gradient is a dense or a sparse tensor. "partly sparse": sparse in every second backward only.
        shape: of the parameter; a table has two dimensions.
        dtype: its name in torch.
        used_by: whose loss contains it: "all", "none", "first": rank 0, "last", "turns": every rank, one
            in each backward, "others": all but that one, "odd": all, in every second backward.
        times: how often the loss contains it: shared weights.
        transposed: whether its memory is not in the order of its elements.
        frozen: whether it needs no gradient at first.
        scaled: whether its learning rate is half that of the others: a parameter group of its own.
        recomputed: whether its part is computed again in the backward, by torch's reentrant checkpoints.
    """

    kind: str = "dense"
    shape: tuple[int, ...] = (3,)
    dtype: str = "float64"
    used_by: str = "all"
    times: int = 1
    transposed: bool = False
    frozen: bool = False
    scaled: bool = False
    recomputed: bool = False


@dataclass(frozen=True)
class Optimizer:
    """A torch optimizer, and what `mpisgd.DistributedOptimizer` is asked for.

    Attributes:
        name: of the class in torch.optim or in mpisgd, or Extragradient; those of mpisgd that average by
            themselves are in `ONE_BIT`.
        settings: its arguments by name.
        layers: which of the model's it updates from the beginning.
        options: of `DistributedOptimizer`, by name, each as the text of a Python expression.
        names: whether parameters get names: "model", "other" ones, or "none".
    """

    name: str = "SGD"
    settings: tuple[tuple[str, Any], ...] = (("lr", 0.5),)
    layers: tuple[int, ...] = (0,)
    options: tuple[tuple[str, str], ...] = ()
    names: str = "model"

    def option(self, name: str, default: str = "") -> str:
        """Return the text of an option."""
        return dict(self.options).get(name, default)

    @property
    def strategy(self) -> mpisgd.Strategy:
        """What `DistributedOptimizer` is asked for."""
        found: mpisgd.Strategy = evaluated(self.option("strategy", "mpisgd.Synchronous()"))
        return found

    @property
    def kind(self) -> Any:
        """The class."""
        if self.name == Extragradient.__name__:
            return Extragradient
        return getattr(torch.optim, self.name, None) or getattr(mpisgd, self.name)

    @property
    def text(self) -> str:
        """The class as programs call it."""
        if self.kind is Extragradient:
            return self.name
        return f"torch.optim.{self.name}" if hasattr(torch.optim, self.name) else f"mpisgd.{self.name}"

    @property
    def passes(self) -> int:
        """How many backward passes fill a window."""
        return int(self.option("backward_passes_per_step", "1"))

    @property
    def averaged_passes(self) -> int:
        """Of how many backward passes gradients are the mean, and not the sum."""
        return self.passes if self.option("reproducible") else 1

    @property
    def weighs_learners(self) -> bool:
        """Whether each step is told how many examples it is of: see `examples_of_step`."""
        strategy = self.strategy
        return (
            isinstance(strategy, mpisgd.DiLoCo)
            and strategy.quorum is not None
            and strategy.weights != "equal"
        )

    @property
    def sums(self) -> bool:
        """Whether gradients are summed and not averaged."""
        return self.option("op") == "mpisgd.ReduceOp.SUM"


@dataclass(frozen=True)
class Program:
    """What is trained, by how many ranks, and how.

    Attributes:
        seed: what it was drawn from.
        ranks: how many.
        ranks_per_host: how many of them count as those of one host; 0: all.
        exact: whether losses are linear and all numbers such that every order of additions gives the same
            bits.
        layers: of the model.
        optimizers: over layers of it, one or several.
        events: what happens.
        group: which ranks train: "world", "duplicate": another group of all, or "reversed".
        scaler: whether losses and steps go through a GradScaler, of each rank.
        forgotten: how many optimizers of other parameters were made before, and deleted.
        apart: whether the ranks begin with different parameters, and when the first one of the group gives
            them its own: "before" the optimizers are made, or "after"; "": they begin alike.
    """

    seed: int
    ranks: int
    ranks_per_host: int
    exact: bool
    layers: tuple[Layer, ...]
    optimizers: tuple[Optimizer, ...]
    events: tuple[Event, ...]
    group: str = "world"
    scaler: bool = False
    forgotten: int = 0
    apart: str = ""

    @property
    def first_rank(self) -> int:
        """The first one of the group."""
        return self.ranks - 1 if self.group == "reversed" else 0

    @property
    def is_resized(self) -> bool:
        """Whether the number of ranks changes."""
        return any(isinstance(event, Reload) and event.ranks for event in self.events)

    @property
    def is_uneven(self) -> bool:
        """Whether some ranks may run out of data."""
        return any(isinstance(event, Join) for event in self.events)

    @property
    def says_examples(self) -> bool:
        """Whether ranks say how many examples they have: not where means count steps outside, too."""
        return all(each.strategy.goes_with.op.goes and not each.sums for each in self.optimizers)

    @property
    def loses(self) -> bool:
        """Whether ranks are lost."""
        return any(isinstance(event, Lose) for event in self.events)


def examples_of(program: Program, ranks: Collection[int]) -> dict[int, int]:
    """Return how many examples a batch of each rank has that has data: a power of two altogether.

    1 each where nobody says how many there are.
    """
    if not program.says_examples:
        return dict.fromkeys(ranks, 1)
    first, *others = sorted(ranks)
    total = 1 << len(others).bit_length()
    return {first: total - len(others), **dict.fromkeys(others, 1)}


def examples_of_step(rank: int) -> int:
    """Return how many examples a step of a rank is of, where the optimizer weighs learners by them."""
    return 1 + rank


def parse(text: str) -> Program:
    """Return the program whose `repr()` it is."""
    names = {kind.__name__: kind for kind in (Program, Layer, Optimizer, *Event.__args__)}
    program = evaluated(text, {**names, "inf": float("inf")})
    if not isinstance(program, Program):
        raise ValueError(f"not a program: {text[:80]}")
    return program
