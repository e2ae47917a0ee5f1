"""`BackwardWatch`: learns that a `backward()` has put gradients into parameters, and when it is over.

torch has no hook for the end of backward, but an engine callback that may be queued while backward runs; so
the first gradient that becomes ready queues it. A hook per parameter costs half a microsecond.
"""

import collections
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["BackwardWatch"]


_watched: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()


class BackwardWatch:
    """Calls `on_end()` once at the end of every outermost `backward()` that reached a watched parameter.

    `on_touch()` is called at the first gradient of each backward, also of a nested one: reentrant
    checkpointing runs a backward inside a backward, at whose end nothing must be reduced yet.

        backward()    node    checkpoint's node                  next node ... end
                                backward() of its part  end
        first gradient here --> touched                  first chance to queue the callback

    Attributes:
        observed: indices of the watched parameters in the order in which the latest backward reached them
            first: one that several nested backward passes use becomes ready several times.
        num_ready: how often each of them was reached; counts until someone clears it.
    """

    def __init__(self, on_touch: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.observed: dict[int, None] = {}
        self.num_ready: collections.Counter[int] = collections.Counter()
        # Weak, so that a forgotten optimizer is gone at once and reduces nothing any more.
        self._on_touch = weakref.WeakMethod(on_touch)
        self._on_end = weakref.WeakMethod(on_end)
        self._graph_task = -1
        self._nested_task = -1
        self._hooks: dict[int, Any] = {}

    def watch(self, params: Sequence[Tensor]) -> None:
        """Watch those of `params` that can ever have a gradient, frozen ones too.

        Whoever watched them until now does so no more: a forgotten optimizer may live on in a reference cycle
        until the garbage collector comes by, on each rank at another time.
        """
        for index, param in enumerate(params):
            if param.is_floating_point() or param.is_complex():
                if param in _watched:
                    _watched[param].remove()
                self._hooks[index] = _watched[param] = _register(param, _hook(weakref.ref(self), index))

    def remove(self) -> None:
        """Watch nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def ready(self, index: int) -> None:
        """Note that the gradient of parameter `index` has been accumulated."""
        # The number of the running backward: a flag would stay set for ever when a backward raises.
        graph_task = torch._C._current_graph_task_id()
        if graph_task not in (self._graph_task, self._nested_task):
            self._begin(graph_task)
        self.observed[index] = None
        self.num_ready[index] += 1

    def _begin(self, graph_task: int) -> None:
        if (on_touch := self._on_touch()) is not None:
            on_touch()
        if _backward_depth() > 1:
            self._nested_task = graph_task
            _before_what_follows(self._begin_outermost)
        else:
            self._begin_outermost()

    def _begin_outermost(self) -> None:
        """Have `_end` called at the end of the backward that is under way."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            self.observed.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if (on_end := self._on_end()) is not None:
            on_end()


def _hook(watch: "weakref.ref[BackwardWatch]", index: int) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the watch, and with it the optimizer, alive."""

    def hook(_: Tensor) -> None:
        alive = watch()
        if alive is not None:
            alive.ready(index)

    return hook


def _register(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register `hook` on `param`, also if it is frozen: torch refuses that, but keeps what is there."""
    trainable = param.requires_grad
    param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        param.requires_grad_(trainable)


def _before_what_follows(call: Callable[[], None]) -> None:
    """Have `call` called once the outermost backward goes on, after the node that runs a backward inside it.

    Should nothing follow there, `step()` finds what was not reduced.
    """
    node = _outermost_node()
    following = () if node is None else node.next_functions
    for function in {function for function, _ in following if function is not None}:
        handles: list[Any] = []

        def once(_: Any, handles: list[Any] = handles) -> None:
            handles.pop().remove()
            call()

        handles.append(function.register_prehook(once))


def _outermost_node() -> torch.autograd.graph.Node | None:
    """Return the node of the outermost backward that is being computed, if it is one written in Python."""
    latest = outermost = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            outermost = latest
        elif isinstance(owner := frame.f_locals.get("self"), BackwardCFunction):
            latest = owner
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


def _backward_depth() -> int:
    """Return how many backward passes are under way on this thread, one inside the other."""
    depth = 0
    frame = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return depth
