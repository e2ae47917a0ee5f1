"""`TorchState`: models, optimizers, samplers and plain objects that start over together.

Each object of a type that is known has a handler, by which it is saved, restored and made alike on all ranks;
handlers of one's own types can be added.
"""

from collections.abc import Iterable
from typing import Any

import torch

from mpisgd.accelerator.host_copy import copy_tree
from mpisgd.horovod.elastic.common import ObjectState
from mpisgd.horovod.elastic.sampler import ElasticSampler
from mpisgd.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from mpisgd.horovod.optimizer import begin_anew
from mpisgd.job.rank_info import rank

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateDictHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """Looks after one object of a state; handlers of one's own types derive from it.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Remember the object as it is."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put the object back to what was last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the object that of rank 0. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Look after another object from now on, and save it."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Adapt the object to the ranks that there are now."""


class StateDictHandler(StateHandler):
    """Of whatever has `state_dict()` and `load_state_dict()`, such as schedulers and scalers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        StateDictHandler.save(self)

    def save(self) -> None:
        """Copy the state dict, into the memory of the last copy."""
        self._saved = copy_tree(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Load the copy; what is loaded may become part of the object, so it is one more copy."""
        self.value.load_state_dict(copy_tree(self._saved))

    def sync(self) -> None:
        """Load rank 0's state dict."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """Of a module."""

    def sync(self) -> None:
        """Copy rank 0's parameters and buffers into this rank's."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """Of an optimizer."""

    def reset(self) -> None:
        """Let one that is distributed begin anew; it may have been made where this rank was alone."""
        begin_anew(self.value)

    def sync(self) -> None:
        """Load rank 0's state."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """Of an `ElasticSampler`, which shares out anew what is left when ranks change."""

    def reset(self) -> None:
        """Share out what is left."""
        self.value.reset()


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs (type, handler class); the first whose type fits looks after an object."""
    return _registry


def set_handler_registry(registry: Iterable[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs; what states hold already keeps its handlers."""
    global _registry
    _registry = list(registry)


def _handler_for(value: Any) -> StateHandler | None:
    """Return a handler that looks after `value`, None if its type has none."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """State whose keyword arguments become attributes that are saved, restored and broadcast.

    Modules, optimizers, schedulers, scalers and `ElasticSampler`s are saved through their state dicts,
    objects with a handler of your own through that, and other values by copies and pickles.

    Args:
        model, optimizer: those of the training; None if there is none, or if it has another name in `kwargs`.
        kwargs: further attributes.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler_for(value) for name, value in given.items()}
        handled = {name: handler for name, handler in handlers.items() if handler is not None}
        super().__setattr__("_handlers", handled)
        for name, handler in handled.items():
            super().__setattr__(name, handler.value)
        plain = {name: value for name, value in given.items() if name not in handled}
        super().__init__(broadcast_object, rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        if (handler := self._handlers.get(name)) is not None:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy all state."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the values that were saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast the values of rank 0, and save them. Collective."""
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        """Let samplers divide the remaining indices among the present ranks."""
        for handler in self._handlers.values():
            handler.reset()
