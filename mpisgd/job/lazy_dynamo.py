"""Importing `torch._dynamo` is left to the first `torch.compile`.

torch's optimizers import it when the first of them is made, and again in `step()`, and so does the first
`torch.utils.checkpoint` with `use_reentrant=True`, only to tell the compiler what not to trace; with False
it asks for its settings. That takes as long as `import torch` did, on every rank at once, and some 75 MB of
each rank's memory. As long as nobody has loaded the compiler there is nothing to tell it, and this leaves it
out; from then on torch's own functions run again.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from mpisgd.job.process_changes import changes

__all__ = ["defer_import", "outside_compiler"]

COMPILER = "torch._dynamo"
CACHE = "__dynamo_disable"  # where a function that torch keeps from the compiler has its untraced form
UNTRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")

Function = Callable[..., Any]


def defer_import() -> None:
    """Let torch's optimizers and checkpoints import `torch._dynamo` no more.

    Does nothing where it is loaded already.

    Where a version of torch is not built as this expects, it imports the module as it always did.
    """
    if COMPILER in sys.modules:
        return
    for name in UNTRACED:
        _call_directly(getattr(Optimizer, name))
    _call_directly(torch.utils.checkpoint.checkpoint)
    for optimizer in Optimizer.__subclasses__():
        step: Any = vars(optimizer).get("step")
        if getattr(step, "__code__", None) is _code_of_steps():
            optimizer.step = _without_compiler(step)  # type: ignore[method-assign]
            changes.callback(_give_back, optimizer, optimizer.step, step)


def _give_back(optimizer: type[Optimizer], ours: Function, step: Function) -> None:
    """Let an optimizer have its step again, unless it has another one by now."""
    if vars(optimizer).get("step") is ours:
        optimizer.step = step  # type: ignore[method-assign]


def _call_directly(method: Function) -> None:
    """Let `method`, of `torch._disable_dynamo`, call what it wraps while there is no compiler."""
    function = getattr(method, "__wrapped__", None)
    if function is not None and CACHE not in vars(function):
        changes.callback(_forget, function, _leave_untraced(method, function))


def outside_compiler(function: Function) -> Function:
    """Decorate what `torch.compile` is to leave out; `torch.compiler.disable` itself loads the compiler."""
    keep_out = getattr(torch._compile, "_disable_dynamo", torch.compiler.disable)
    method: Function = keep_out(function)
    if keep_out is not torch.compiler.disable:
        _leave_untraced(method, function)
    return method


def _leave_untraced(method: Function, function: Function) -> Function:
    """Let `method` call the `function` that it wraps while there is no compiler; return what does so."""

    def untraced(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return function(*args, **kwargs)
        vars(function).pop(CACHE, None)  # torch puts its own there
        return method(*args, **kwargs)

    vars(function)[CACHE] = untraced
    return untraced


def _forget(function: Function, untraced: Function) -> None:
    if vars(function).get(CACHE) is untraced:
        del vars(function)[CACHE]


def _without_compiler(step: Function) -> Function:
    """Return `step`, of `_use_grad_for_differentiable`, without what it asks the compiler for."""
    unwrapped: Function = step.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return step(*args, **kwargs)
        with torch.set_grad_enabled(args[0].defaults["differentiable"]):
            return unwrapped(*args, **kwargs)

    return wrapped


@functools.cache
def _code_of_steps() -> Any:
    """Return the code that all functions of `_use_grad_for_differentiable` share; None if torch has none."""
    decorate = getattr(optimizer_module, "_use_grad_for_differentiable", None)
    return None if decorate is None else decorate(lambda optimizer: None).__code__
