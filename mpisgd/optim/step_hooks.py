"""Hooks of `step` that run once for each step, also where a class's step calls that of its parent.

torch wraps the `step` of each class of which an optimizer is made: where there has been an SGD, and a
subclass of it whose `step` calls `super().step()`, both are wrapped, and the hooks of the optimizer run
twice. A class with what this module makes notes which of them is the outer one.

torch has no hook for a step that raises. Where one is wanted, the class's `step` is made here in any case.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from mpisgd.sharding.elementwise import WRAPPERS

__all__ = ["StepArguments", "keep_last", "register_step_hooks", "step_noting_depth", "wrap_closure"]

PreHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
PostHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]

OUTSIDE = 1  # how many pre-hooks have begun, less post-hooks: what runs outside of a step is an inner one


def step_noting_depth(
    wrapped: type[torch.optim.Optimizer],
    outer: type[torch.optim.Optimizer] = torch.optim.Optimizer,
    failed: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Return the members that a subclass of `wrapped` must have for `register_step_hooks`.

    That is nothing where there is no step of a parent that `wrapped.step` might call, and no `failed`.

    Args:
        wrapped: the class of an optimizer.
        outer: another base class, which comes before it and may have a step of its own.
        failed: called with the optimizer when a step of it has raised.
    """
    num_steps = sum("step" in vars(cls) for cls in wrapped.__mro__ if cls is not torch.optim.Optimizer)
    if num_steps < 2 and failed is None:
        return {}

    inner = wrapped.step if outer.step is torch.optim.Optimizer.step else outer.step

    @functools.wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_depth = 0
        try:
            return inner(self, *args, **kwargs)
        except BaseException:
            if failed is not None:
                failed(self)
            raise
        finally:
            self._step_depth = OUTSIDE

    WRAPPERS.add(step.__code__)  # type: ignore[attr-defined]
    return {"step": step, "_step_depth": OUTSIDE}


def register_step_hooks(
    optimizer: torch.optim.Optimizer,
    first: PreHook,
    after: PostHook | None = None,
    *,
    last: PreHook | None = None,
) -> None:
    """Let hooks run once in each step of an optimizer of a class with `step_noting_depth`.

    Args:
        optimizer: of such a class.
        first: runs before the hooks of the program.
        after: runs after the step, and before theirs.
        last: runs after the program's hooks and before the step; see `keep_last`.
    """

    def begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = getattr(optimizer, "_step_depth", None)
        if depth is not None:
            optimizer._step_depth = depth + 1
        return None if depth else first(optimizer, args, kwargs)

    def begin_last(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_outer = getattr(optimizer, "_step_depth", 1) == 1
        return last(optimizer, args, kwargs) if last is not None and is_outer else None

    def end(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        depth = getattr(optimizer, "_step_depth", 1) - 1
        if hasattr(optimizer, "_step_depth"):
            optimizer._step_depth = depth
        if not depth and after is not None:
            after(optimizer, args, kwargs)

    handle = optimizer.register_step_pre_hook(begin)
    _move_to_front(optimizer._optimizer_step_pre_hooks, handle.id)
    handle = optimizer.register_step_post_hook(end)
    _move_to_front(optimizer._optimizer_step_post_hooks, handle.id)
    if last is not None:
        vars(optimizer)["_last_pre_hook"] = optimizer.register_step_pre_hook(begin_last).id


def keep_last(optimizer: torch.optim.Optimizer) -> None:
    """Let `last` come last again, after the program has registered a hook."""
    hooks, number = optimizer._optimizer_step_pre_hooks, vars(optimizer).get("_last_pre_hook")
    if number in hooks:
        hooks[number] = hooks.pop(number)


def _move_to_front(hooks: dict[int, Any], number: int) -> None:
    others = [other for other in hooks if other != number]
    for other in others:
        hooks[other] = hooks.pop(other)


StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> StepArguments | None:
    """Return the arguments of `step`, the optimizer first, with its closure wrapped; None if it has none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    if len(args) > 1:
        return (args[0], wrap(closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": wrap(closure)}
