"""`Training`: a program carried out, event by event, with plain torch.

It has the losses of all ranks, or of some, and is independent of mpisgd. `DistributedTraining` is what uses
mpisgd.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.events import Event
from mpisgd.tools.verification.programs.model import Model
from mpisgd.tools.verification.programs.program import ONE_BIT, Optimizer, Program, examples_of
from mpisgd.tools.verification.programs.serial_dion import SerialDion

__all__ = ["SERIAL", "Training", "initial_groups"]

SERIAL = "Dion"  # averages by itself, and has a definition in one process
OF_ADAM = ("lr", "betas", "eps", "weight_decay")
DIVIDES_GROUPS = (SERIAL, "MuonWithAdamW")


class Training:
    """A program with plain torch.

    Args:
        program: what is carried out.
        ranks: whose losses are added up.
        weight: what each of them counts.

    Attributes:
        model: which is trained.
        optimizers: those of now.
        ranks: as given, until their number changes.
        weight: likewise.
        scaler: of the losses, if they are scaled.
        examples: inside `join()`, how many a batch of each rank has that has data; {} elsewhere.
    """

    def __init__(self, program: Program, ranks: Collection[int], weight: float = 1.0) -> None:
        self.program = program
        self.model = Model(program)
        self.ranks, self.weight = ranks, weight
        self.scaler = _scaler() if program.scaler else None
        self.examples: dict[int, int] = {}
        self._groups = [initial_groups(program, optimizer) for optimizer in program.optimizers]
        self.begin()
        self.optimizers: list[Any] = [self.make(place) for place in range(len(program.optimizers))]

    def begin(self) -> None:
        """Begin with the parameters of the first rank, before there are optimizers: one process has these."""

    @property
    def takes_part(self) -> bool:
        """Whether it trains now."""
        return True

    @property
    def num_ranks(self) -> int:
        """How many train now."""
        return len(self.ranks)

    @property
    def members(self) -> Sequence[Training]:
        """Those whose models are looked at: the one that there is."""
        return [self]

    @property
    def layers(self) -> set[int]:
        """Those that an optimizer has."""
        return {layer for groups in self._groups for group, _ in groups for layer in group}

    def params_of(self, place: int) -> list[nn.Parameter]:
        """Return the parameters of an optimizer."""
        return [self.model.params[layer] for group, _ in self._groups[place] for layer in group]

    def make(self, place: int) -> Any:
        """Make an optimizer with all groups that it has by now."""
        optimizer = self.program.optimizers[place]
        if optimizer.name == SERIAL:
            return SerialDion(self.groups_of(place), **dict(optimizer.settings))
        if optimizer.name in ONE_BIT:  # as long as nothing of it travels by one bit
            of_adam = {name: value for name, value in optimizer.settings if name in OF_ADAM}
            return torch.optim.Adam(self.groups_of(place), **of_adam)
        return optimizer.kind(self.groups_of(place), **dict(optimizer.settings))

    def groups_of(self, place: int) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimizer, to make it."""
        optimizer = self.program.optimizers[place]
        return [self._param_group(group, factor, optimizer) for group, factor in self._groups[place]]

    def _param_group(self, layers: Sequence[int], factor: float, optimizer: Optimizer) -> dict[str, Any]:
        rate = dict(optimizer.settings).get("lr")
        group: dict[str, Any] = {"params": [self.model.params[layer] for layer in layers]}
        return group if rate is None else {**group, "lr": rate * factor}

    def do(self, event: Event) -> None:
        """Carry out an event."""
        match event:
            case events.Backward():
                self.backward(event)
            case events.FailedBackward():
                self.fail(event)
                self.zero_grad(events.ZeroGrad())
            case events.Step():
                self.step(event)
            case events.ZeroGrad():
                self.zero_grad(event)
            case events.Clip():
                self.unscale()
                self.clip(event)
            case events.SetGradient():
                self.model.params[event.layer].grad = self.model.gradient_for(event)
            case events.Synchronize():
                self.synchronize()
            case events.SetFrozen():
                self.model.params[event.layer].requires_grad_(not event.frozen)
            case events.AddGroup():
                self.note_group(event)
                self.optimizers[event.optimizer].add_param_group(
                    self._param_group((event.layer,), 1.0, self.program.optimizers[event.optimizer])
                )
            case events.Reload():
                self.reload(event)
            case events.SetRate():
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] *= event.factor
            case events.Broadcast():
                self.broadcast(event)
            case events.Convert():
                self.convert(event)
            case events.Join():
                self.join()
            case events.RunOut():
                self.run_out(event)
            case events.EndJoin():
                self.end_join()

    def note_group(self, event: events.AddGroup) -> None:
        """Note that an optimizer has another group."""
        self._groups[event.optimizer].append(((event.layer,), 1.0))

    def loss(
        self, data: Sequence[int], ranks: Collection[int], overflow: Collection[int] = ()
    ) -> Tensor | None:
        """Return the joint loss of some ranks, None if there is none."""
        layers = self.layers
        losses = {(rank, each): self.model.loss(rank, each, layers) for rank in ranks for each in data}
        exist = [
            self.weighted(rank, loss * math.inf if rank in overflow else loss)
            for (rank, _), loss in losses.items()
            if loss is not None
        ]
        return torch.stack(exist).sum() * self.weight if exist else None

    def weighted(self, rank: int, loss: Tensor) -> Tensor:
        """Return the weight of a rank's loss."""
        return loss

    @property
    def with_data(self) -> list[int]:
        """Those of the ranks that have data."""
        return [rank for rank in self.ranks if not self.examples or rank in self.examples]

    def join(self) -> None:
        """Begin a block of `join()`."""
        self.examples = examples_of(self.program, range(self.num_ranks))

    def run_out(self, event: events.RunOut) -> None:
        """Go on with the losses of those that have data."""
        self.examples = examples_of(self.program, {*self.examples} - {*event.ranks})

    def end_join(self) -> None:
        """End the block."""
        self.examples = {}

    def backward(self, event: events.Backward) -> None:
        """Add to the gradients."""
        ranks = [rank for rank in self.with_data if rank not in event.skipped]
        loss = self.loss(event.data, ranks, event.overflow)
        if loss is not None:
            torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def step(self, event: events.Step, places: Sequence[int] | None = None) -> None:
        """Update the parameters of these optimizers; None: of all."""
        for place in range(len(self.optimizers)) if places is None else places:
            optimizer = self.optimizers[place]
            if self.scaler is not None:
                self.scaler.step(optimizer)
            elif event.closure:
                optimizer.step(lambda: self.compute(event))
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()

    @torch.enable_grad()
    def compute(self, event: events.Step) -> Tensor:
        """Reset the gradients and compute new ones, as a closure; return the loss."""
        self.zero_grad(events.ZeroGrad())
        loss = self.loss(event.closure, self.with_data)
        if loss is None:
            return torch.zeros((), dtype=torch.float64)
        torch.autograd.backward(loss)
        return loss.detach()

    def fail(self, event: events.FailedBackward) -> None:
        """Leave the gradients in whatever state."""

    def zero_grad(self, event: events.ZeroGrad) -> None:
        """Reset the gradients."""
        if event.by_model:
            for layer in self.layers:
                _reset(self.model.params[layer], event.set_to_none)
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=event.set_to_none)

    def clip(self, event: events.Clip) -> None:
        """Clip the gradients of each optimizer."""
        for place in range(len(self.optimizers)):
            if event.by_value:
                nn.utils.clip_grad_value_(self.params_of(place), event.max_norm)
            else:
                nn.utils.clip_grad_norm_(self.params_of(place), event.max_norm, event.norm_type)

    def unscale(self) -> None:
        """Divide the gradients by the scale, where there is one, before somebody looks at them."""
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)

    def broadcast(self, event: events.Broadcast) -> None:
        """Take over what a rank has: of one process it is."""

    def convert(self, event: events.Convert) -> None:
        """Convert a parameter as a module that has it does."""
        held: Any = nn.ParameterList(
            [self.model.params[event.layer]]
        )  # `to` has more forms than torch declares
        if event.channels_last:
            held.to(memory_format=torch.channels_last)
        else:
            held.to(getattr(torch, event.dtype))

    def synchronize(self) -> None:
        """Combine the gradients of all ranks: of one process they are."""

    def reload(self, event: events.Reload) -> None:
        """Go on with new optimizers."""
        states = self.saved(event)
        if event.ranks:
            self.resize(event.ranks)
        former = self.optimizers
        if event.clears:
            former.clear()
        self.take_over(states)

    def saved(self, event: events.Reload) -> list[dict[str, Any]]:
        """Return the states that new optimizers are to load."""
        return self.states()

    def resize(self, num_ranks: int) -> None:
        """Go on with the losses of so many ranks."""
        self.ranks = range(num_ranks)

    def shrink(self, left: Collection[int]) -> None:
        """Go on without gradients, and with the losses of these ranks: the others were lost."""
        self.ranks = left
        self.zero_grad(events.ZeroGrad())
        self.renew_scaler()

    def renew_scaler(self) -> None:
        """Make a scaler with the scale of the former one, which may be in the middle of a step."""
        self.take_scale(self)

    def take_scale(self, other: Training) -> None:
        """Make a scaler with the scale of that of another training."""
        if other.scaler is not None:
            former, self.scaler = other.scaler, _scaler()
            self.scaler.load_state_dict(former.state_dict())

    def take_over(self, states: Sequence[dict[str, Any]]) -> None:
        """Make new optimizers, which load these states."""
        self.optimizers = [self.make(place) for place in range(len(states))]
        for place, state in enumerate(states):
            self.load(place, state)
        self.zero_grad(events.ZeroGrad())

    def load(self, place: int, state: dict[str, Any]) -> None:
        """Have an optimizer load a state."""
        self.optimizers[place].load_state_dict(state)

    def states(self) -> list[dict[str, Any]]:
        """Return the state dicts of the optimizers."""
        return [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]


def _scaler() -> torch.amp.GradScaler:
    # A power of two, which halves where gradients overflow, so that scaling rounds nothing.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10_000)
    scaler.scale(torch.zeros(()))  # else a rank without a backward does not know the scale
    return scaler


def initial_groups(program: Program, optimizer: Optimizer) -> list[tuple[tuple[int, ...], float]]:
    """Return the parameter groups of an optimizer: layers, and a factor of the learning rate.

    Layers are in the optimizer's order: one that has groups for matrices has these first.
    """
    layers = optimizer.layers
    if optimizer.name in DIVIDES_GROUPS:
        layers = tuple(sorted(layers, key=lambda layer: len(program.layers[layer].shape) != 2))
    whole = tuple(layer for layer in layers if not program.layers[layer].scaled)
    half = tuple(layer for layer in layers if program.layers[layer].scaled)
    return [(layers, factor) for layers, factor in ((whole, 1.0), (half, 0.5)) if layers]


def _reset(param: nn.Parameter, set_to_none: bool) -> None:
    """Do as `Module.zero_grad`."""
    if set_to_none or param.grad is None:
        param.grad = None
    else:
        param.grad = param.grad.detach().zero_()
