"""The class of an optimizer that is wrapped where it is: made of the wrapper's and its own."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from mpisgd.errors import InvalidArgument
from mpisgd.methods.strategy.goes_with import averages_by_itself
from mpisgd.optim.step_hooks import step_noting_depth

__all__ = ["signature_of", "turned_into", "wrapped_class"]

# By the wrapper, which may be a subclass of the user's, and what is wrapped.
_classes: dict[tuple[type, type], type[torch.optim.Optimizer]] = {}


def turned_into(
    wrapper: type[torch.optim.Optimizer],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return `optimizer` itself, turned into an instance of `wrapper` and of its own class.

    Raises:
        InvalidArgument: it is no torch optimizer, or communicates already.
        TypeError: the arguments are not those of `wrapper.__init__`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise InvalidArgument(f"DistributedOptimizer: optimizer is a {kind}; expected a torch optimizer")
    if type(optimizer) in _classes.values():
        raise InvalidArgument("DistributedOptimizer: this optimizer is distributed already")
    if averages_by_itself(optimizer):
        raise InvalidArgument(
            f"DistributedOptimizer: {type(optimizer).__name__} averages by itself, over the group it was "
            "made for; use it as it is"
        )
    # Python calls __init__ next, which can undo this, but is never entered with arguments it has not.
    _check_arguments(inspect.signature(wrapper.__init__), (optimizer, optimizer, *args), options)
    optimizer.__class__ = _joined(wrapper, type(optimizer))
    return optimizer


def _joined(wrapper: type, wrapped: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if (wrapper, wrapped) not in _classes:
        name = wrapper.__name__.removesuffix("Optimizer") + wrapped.__name__
        step = step_noting_depth(wrapped, wrapper, lambda optimizer: optimizer._end_failed_step())
        body = {"__doc__": wrapped.__doc__, "__module__": wrapped.__module__, **step}
        _classes[wrapper, wrapped] = type(name, (wrapper, wrapped), body)
    return _classes[wrapper, wrapped]


def wrapped_class(joined: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the class of the optimizer that was wrapped."""
    wrapped: type[torch.optim.Optimizer] = joined.__bases__[1]
    return wrapped


def _check_arguments(signature: inspect.Signature, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise TypeError where arguments do not fit, as Python does; an option that is misspelt is corrected."""
    for name in options:
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        if name not in signature.parameters and not takes_any:
            close = difflib.get_close_matches(name, signature.parameters, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"DistributedOptimizer() got an unexpected keyword argument {name!r}{hint}")
    try:
        signature.bind(*args, **options)
    except TypeError as exc:
        raise TypeError(f"DistributedOptimizer() {exc}") from None


def signature_of(wrapper: type[torch.optim.Optimizer]) -> inspect.Signature:
    """Return the signature that help() shows: __new__ takes whatever __init__ does."""
    signature = inspect.signature(wrapper.__init__)
    _, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters, return_annotation=wrapper)
