"""`Training`: a program carried out, event by event, with plain torch; and with mpisgd on one rank.

The plain one has the losses of all ranks, or of some, and is independent of mpisgd. The distributed one
uses only what a user can.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from fuzzing import program as events
from fuzzing.model import Model
from fuzzing.program import Event, Optimizer, Program

__all__ = ["DistributedTraining", "Training"]


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Raise what a program may go on after."""
        raise ArithmeticError("this backward is to fail")


class Training:
    """A program with plain torch.

    Args:
        program: what is carried out.
        ranks: whose losses are added up.
        weight: what each of them counts.

    Attributes:
        model: which is trained.
        optimizers: those of now.
    """

    def __init__(self, program: Program, ranks: Collection[int], weight: float = 1.0) -> None:
        self.program = program
        self.model = Model(program)
        self._ranks, self._weight = ranks, weight
        self._groups = [_initial_groups(program, optimizer) for optimizer in program.optimizers]
        self.optimizers: list[Any] = [self.make(place) for place in range(len(program.optimizers))]

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
        groups = [self._param_group(group, factor, optimizer) for group, factor in self._groups[place]]
        return getattr(torch.optim, optimizer.name)(groups, **dict(optimizer.settings))

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
                for optimizer in self.optimizers:
                    optimizer.step()
            case events.ZeroGrad():
                self.zero_grad(event)
            case events.Clip():
                self.clip(event)
            case events.Synchronize():
                self.synchronize()
            case events.SetFrozen():
                self.model.params[event.layer].requires_grad_(not event.frozen)
            case events.AddGroup():
                self._groups[event.optimizer].append(((event.layer,), 1.0))
                optimizer = self.program.optimizers[event.optimizer]
                self.optimizers[event.optimizer].add_param_group(
                    self._param_group((event.layer,), 1.0, optimizer)
                )
            case events.Reload():
                self.reload(event)
            case events.SetRate():
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] *= event.factor

    def loss(self, data: Sequence[int], ranks: Collection[int]) -> Tensor | None:
        """Return the joint loss of some ranks, None if there is none."""
        layers = self.layers
        losses = [self.model.loss(rank, each, layers) for rank in ranks for each in data]
        exist = [loss for loss in losses if loss is not None]
        return torch.stack(exist).sum() * self._weight if exist else None

    def backward(self, event: events.Backward) -> None:
        """Add to the gradients."""
        loss = self.loss(event.data, [rank for rank in self._ranks if rank not in event.skipped])
        if loss is not None:
            loss.backward()

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
            nn.utils.clip_grad_norm_(self.params_of(place), event.max_norm, event.norm_type)

    def synchronize(self) -> None:
        """Combine the gradients of all ranks: of one process they are."""

    def reload(self, event: events.Reload) -> None:
        """Go on with new optimizers."""
        states = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
        former = self.optimizers
        if event.clears:
            former.clear()
        self.optimizers = [self.make(place) for place in range(len(states))]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.zero_grad(events.ZeroGrad())

    def states(self) -> list[dict[str, Any]]:
        """Return the state dicts of the optimizers."""
        return [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]


class DistributedTraining(Training):
    """A program with mpisgd, on this rank."""

    def __init__(self, program: Program, group: mpisgd.Group | None) -> None:
        self._group = group
        weight = 1.0 if program.optimizers[0].sums else float(program.ranks)
        super().__init__(program, [mpisgd.rank()], weight)

    def make(self, place: int) -> Any:
        """See `Training`."""
        optimizer = self.program.optimizers[place]
        names = {"mpisgd": mpisgd, "torch": torch}
        options = {name: eval(text, {"__builtins__": {}}, names) for name, text in optimizer.options}
        if optimizer.names != "none":
            form = "layers.{}" if optimizer.names == "model" else "other_{}.weight"
            options["named_parameters"] = [(form.format(i), p) for i, p in enumerate(self.model.params)]
        return mpisgd.DistributedOptimizer(super().make(place), group=self._group, **options)

    def wait(self) -> None:
        """Return when the parameters have arrived: no module waits for them here."""
        for place, optimizer in enumerate(self.optimizers):
            if "overlap_forward" in self.program.optimizers[place].option("strategy"):
                optimizer.synchronizer.wait()

    def do(self, event: Event) -> None:
        """See `Training`."""
        super().do(event)
        self.wait()

    def backward(self, event: events.Backward) -> None:
        """See `Training`."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers if event.no_sync else ():
                stack.enter_context(optimizer.no_sync())
            super().backward(event)

    def fail(self, event: events.FailedBackward) -> None:
        """See `Training`."""
        # What is made first is what backward comes to last.
        raises = Raises.apply(self.model.params[self._always_used].double().sum())
        loss = self.loss(event.data, self._ranks)
        with contextlib.suppress(ArithmeticError):
            (raises if loss is None else raises + loss).backward()

    @property
    def _always_used(self) -> int:
        return min(i for i in self.layers if self.model.params[i].requires_grad)

    def clip(self, event: events.Clip) -> None:
        """See `Training`."""
        if event.by_torch:
            super().clip(event)
            return
        for optimizer in self.optimizers:
            optimizer.clip_grad_norm_(event.max_norm, event.norm_type)

    def synchronize(self) -> None:
        """See `Training`."""
        for optimizer in self.optimizers:
            optimizer.synchronize()


def _initial_groups(program: Program, optimizer: Optimizer) -> list[tuple[tuple[int, ...], float]]:
    """Return the parameter groups of an optimizer: layers, and a factor of the learning rate."""
    whole = tuple(layer for layer in optimizer.layers if not program.layers[layer].scaled)
    half = tuple(layer for layer in optimizer.layers if program.layers[layer].scaled)
    return [(layers, factor) for layers, factor in ((whole, 1.0), (half, 0.5)) if layers]


def _reset(param: nn.Parameter, set_to_none: bool) -> None:
    """Do as `Module.zero_grad`."""
    if set_to_none or param.grad is None:
        param.grad = None
    else:
        param.grad = param.grad.detach().zero_()
