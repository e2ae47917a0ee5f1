"""`TorchState`: models, optimizers, samplers and plain objects that start over together."""

from typing import Any

from mpisgd.horovod.elastic.common import ObjectState
from mpisgd.horovod.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    handler_for,
    set_handler_registry,
)
from mpisgd.horovod.objects import broadcast_object
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


class TorchState(ObjectState):
    """Everything that is an argument is an attribute, and is saved, put back and made alike on all ranks.

    Modules, optimizers, schedulers, scalers and `ElasticSampler`s through their state dicts, what has a
    handler of one's own through that, and everything else as a plain object, which is copied and pickled.

    Args:
        model, optimizer: of the training; None where there is none, or where they have other names.
        kwargs: more of them.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler_for(value) for name, value in given.items()}
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
        """Put everything back to what was last saved."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make everything that of rank 0, and save it. Collective."""
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        """Let samplers share out anew what is left."""
        for handler in self._handlers.values():
            handler.reset()
