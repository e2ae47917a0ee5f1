"""`BackwardHooks`: learns that a `backward()` has put gradients into parameters, and when it is over.

torch has no hook for the end of backward, but an engine callback that may be queued while backward runs; so
the first gradient that becomes ready queues it. There is a hook per parameter, and models have hundreds of
them: what it does in the ordinary case is one comparison and one note.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from mpisgd.accelerator.capture import check_not_capturing
from mpisgd.gradients.hook_order import coming_last, moved_to_end

__all__ = ["BackwardHooks", "Notes", "backward_depth"]


class _Watcher(NamedTuple):
    """Who watches a parameter: its hooks, the number there, and the hook on it, if there is one."""

    hooks: "weakref.ref[BackwardHooks]"
    number: int
    handle: Any


_watched: MutableMapping[Tensor, _Watcher] = WeakTensorKeyDictionary()


class Notes:
    """What the hooks write down. They hold this and not the `BackwardHooks`, which hold the optimizer.

    Attributes:
        observed: indices of the watched parameters in the order in which the latest backward reached them
            first. One that several nested backward passes use becomes ready several times.
        graph_task: the number of the backward whose beginning has been noticed. A flag would stay set for
            ever when a backward raises.
        reports_each: whether `on_ready(index)` is called whenever a gradient has been accumulated.
    """

    def __init__(self) -> None:
        self.observed: dict[int, None] = {}
        self.graph_task = -1
        self.reports_each = False


class BackwardHooks:
    """Calls `on_end()` once at the end of every outermost `backward()` that reached a watched parameter.

    `on_touch(nested)` is called at the first gradient of each backward, also of a nested one: reentrant
    checkpointing runs a backward inside a backward, at whose end nothing must be reduced yet.

        backward()    node    checkpoint's node                  next node ... end
                                backward() of its part  end
        first gradient here --> touched                  first chance to queue the callback

    A parameter has one watcher, the one that was made last, and that one is told to whom it lost one. So a
    forgotten optimizer does nothing any more as soon as there is another one over its parameters: it may live
    on in a reference cycle until the garbage collector comes by, on each rank at another time.

    Attributes:
        notes: see there.
        watching: indices of the parameters that are watched.
        first_ready: index of the first one in the backward that has begun.
        outer_task: number of the outermost backward whose end has been, or will be told.
        watcher: the object whose methods are called.
    """

    def __init__(
        self,
        on_touch: Callable[[bool], None],
        on_ready: Callable[[int], None],
        on_end: Callable[[], None],
        on_loss: Callable[[int, Any], None] = lambda index, watcher: None,
    ) -> None:
        self.notes = Notes()
        self.watching: set[int] = set()
        self.first_ready = -1
        self.outer_task = -1
        # Weak, so that a forgotten optimizer is gone at once and reduces nothing any more.
        self._on_touch = weakref.WeakMethod(on_touch)
        self._on_ready = _weak(on_ready)
        self._on_end = weakref.WeakMethod(on_end)
        self._on_loss = _weak_or_plain(on_loss)
        self._handles: dict[int, Any] = {}
        self._unreported: list[int] = []  # ready, but hooks of the program came after ours in this backward

    @property
    def watcher(self) -> Any:
        """The object whose methods are called; None if it is gone."""
        return getattr(self._on_end(), "__self__", None)

    def watch(self, params: Sequence[Tensor], lost: Collection[int] = ()) -> None:
        """Watch those of `params` that can ever have a gradient, frozen ones too, and no others.

        Args:
            params: from whoever watched them until now they are taken.
            lost: indices of those that stay with others.
        """
        self.remove()
        for index, param in enumerate(params):
            if index not in lost and _is_trainable(param):
                self._take(param, index)
                handle = _register(param, _hook(self.notes, weakref.ref(self), index))
                _watched[param] = _Watcher(weakref.ref(self), index, handle)
                self._handles[index] = handle
                self.watching.add(index)

    def take(self, params: Sequence[Tensor], lost: Collection[int] = ()) -> None:
        """Let nobody watch `params`, without watching them. `lost`: as for `watch`."""
        for index, param in enumerate(params):
            if index not in lost and _is_trainable(param):
                self._take(param, index)
                _watched[param] = _Watcher(weakref.ref(self), index, None)

    def _take(self, param: Tensor, index: int) -> None:
        """Take a parameter from whoever watches it."""
        if (watcher := _watched.get(param)) is not None:
            hooks = watcher.hooks()
            if watcher.handle is not None:
                watcher.handle.remove()
            if hooks is not None and hooks is not self:
                hooks._lose(watcher.number, self.watcher)

    def _lose(self, index: int, watcher: Any) -> None:
        self._handles.pop(index, None)
        self.watching.discard(index)
        self._on_loss(index, watcher)

    def remove(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.watching.clear()

    def ready(self, index: int, param: Tensor) -> None:
        """Note that the gradient of parameter `index` has been accumulated, where that is not all."""
        notes, graph_task = self.notes, _current_task()
        if graph_task != notes.graph_task:
            notes.graph_task = graph_task
            if graph_task != self.outer_task:
                self.first_ready = index
                self._begin()
        if notes.reports_each:
            if moved_to_end(param, self._handles[index]):
                self._unreported.append(index)
            else:
                self._on_ready(index)

    def _begin(self) -> None:
        check_not_capturing("backward over parameters of a DistributedOptimizer")
        nested = backward_depth() > 1
        if (on_touch := self._on_touch()) is not None:
            on_touch(nested)
        if nested:
            _before_what_follows(self._begin_outermost)
        else:
            self._begin_outermost()

    def _begin_outermost(self) -> None:
        """Have `_end` called at the end of the backward that is under way."""
        graph_task = _current_task()
        if graph_task != self.outer_task:
            self.outer_task = graph_task
            self.notes.observed.clear()
            self._unreported.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        for index in self._unreported:
            self._on_ready(index)
        self._unreported.clear()
        if (on_end := self._on_end()) is not None:
            on_end()


_current_task = torch._C._current_graph_task_id


def _weak(method: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that calls a method as long as its object is there; faster than a `WeakMethod`."""
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(index: int) -> None:
        if (alive := owner()) is not None:
            function(alive, index)

    return call


def _weak_or_plain(method: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return a function that calls a method as long as its object is there; a plain function as it is."""
    if not hasattr(method, "__self__"):
        return method
    reference = weakref.WeakMethod(method)

    def call(index: int, watcher: Any) -> None:
        if (alive := reference()) is not None:
            alive(index, watcher)

    return call


def _is_trainable(param: Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


def _hook(notes: Notes, watch: "weakref.ref[BackwardHooks]", index: int) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the watch, and with it the optimizer, alive."""
    current_task, observed = _current_task, notes.observed

    def hook(param: Tensor) -> None:
        if notes.reports_each or current_task() != notes.graph_task:
            alive = watch()
            if alive is None:
                return
            alive.ready(index, param)
        observed[index] = None

    return coming_last(hook)


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
    latest: Any = None
    outermost: Any = None
    for frame in _frames():
        if _runs_backward(frame):
            outermost = latest
        elif frame is not None and isinstance(owner := frame.f_locals.get("self"), BackwardCFunction):
            latest = owner
    return outermost  # type: ignore[no-any-return]


def backward_depth() -> int:
    """Return how many backward passes are under way, one inside the other."""
    return sum(map(_runs_backward, _frames()))


def _frames() -> "Iterator[FrameType | None]":
    """Yield the frames of this thread, the innermost first.

    What lies on a GPU is computed by a thread of the engine's, which has called no `backward()`: that was the
    program, in another thread. None stands for it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
    if isinstance(threading.current_thread(), threading._DummyThread):  # Python has not started it
        yield None


def _runs_backward(frame: "FrameType | None") -> bool:
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
