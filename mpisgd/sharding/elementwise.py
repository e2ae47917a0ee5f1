"""Which optimizers update each element of a parameter by itself, and may be given parts of parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["WRAPPERS", "counts_on_device", "is_known_elementwise", "is_known_step", "may_join", "single_step"]

# The code of functions that call a step and do nothing to parameters: torch's for its hooks, and our own.
WRAPPERS = {torch.optim.Optimizer.profile_hook_step(lambda: None).__code__}

KNOWN = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def is_known_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step of an optimizer is that of one of torch's elementwise ones, not overridden."""
    known = is_known_step(type(optimizer).step)
    return known and not any(group.get("differentiable") for group in optimizer.param_groups)


def is_known_step(step: Any) -> bool:
    """Return whether a `step` is that of one of torch's elementwise optimizers.

    Which classes torch has wrapped a step in for its hooks, the optimizer's or its parent's, depends on which
    of them were made before.
    """
    return any(_without_hooks(step) is _without_hooks(cls.step) for cls in KNOWN)


def _without_hooks(step: Any) -> Any:
    while getattr(step, "__code__", None) in WRAPPERS:
        step = step.__wrapped__
    return step


def may_join(options: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return whether neighbours may be updated as one tensor, to the last bit.

    torch's fused kernels, and its arithmetic of 16-bit floats, round the last few elements of a tensor
    otherwise than those before.

    Args:
        options: of the optimizer's group.
        dtype: of the parameters.
    """
    return dtype.itemsize > 2 and not options.get("fused")


def counts_on_device(options: Mapping[str, Any]) -> bool:
    """Return whether torch's optimizers keep the counts of steps on the device of the parameters.

    Args:
        options: of the optimizer's group.
    """
    return bool(options.get("fused") or options.get("capturable"))


def single_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], None]:
    """Return the step of an optimizer's groups, without hooks; to be called under `torch.no_grad()`.

    Of a known elementwise one, which keeps nothing but the state of each parameter: it may be called for one
    piece after another. torch wraps it twice, for hooks and for its mode of gradients; for small pieces that
    takes as long as the update.
    """
    step: Callable[[torch.optim.Optimizer], None] = inspect.unwrap(type(optimizer).step)
    return step
