"""How objects of some types are saved, put back and made alike on all ranks; one's own types can be added."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from mpisgd.horovod.elastic.sampler import ElasticSampler
from mpisgd.horovod.objects import broadcast_object
from mpisgd.horovod.optimizer import begin_anew
from mpisgd.horovod.parameters import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateDictHandler",
    "StateHandler",
    "get_handler_registry",
    "handler_for",
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
        StateDictHandler.save(self)

    def save(self) -> None:
        """Copy the state dict."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy; what is loaded may become part of the object, so it is one more copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

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


def handler_for(value: Any) -> StateHandler | None:
    """Return a handler that looks after `value`, None if its type has none."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
