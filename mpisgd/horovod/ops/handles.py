"""Handles: numbers that stand for operations under way."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec

from mpisgd.arguments import shown
from mpisgd.horovod import state
from mpisgd.horovod.engine.entry import Entry

__all__ = ["forget", "keep", "poll", "synchronize", "synchronous"]

P = ParamSpec("P")

_numbers = itertools.count()
_entries: dict[int, Entry] = {}


def keep(entry: Entry) -> int:
    """Let the next number stand for an operation, and return it."""
    handle = next(_numbers)
    _entries[handle] = entry
    return handle


def forget(handle: int) -> None:
    """Let a number stand for nothing any more."""
    _entries.pop(handle, None)


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once.

    Raises:
        ValueError: an unknown handle.
    """
    found = _entries.get(handle) if isinstance(handle, int) else None
    if found is None:
        raise ValueError(f"handle {shown(handle)} was not given out, or has been synchronized")
    if not found.done.is_set():
        state.engine().submit_deferred()  # a program that polls waits, too
    return found.done.is_set()


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result; None for a handle that was synchronized before.

    Args:
        handle: what an `_async` function returned; that of `sparse_allreduce_async` is a function.

    Raises:
        HorovodInternalError: the operation failed, on all its ranks.
        ValueError: not a handle.
    """
    if callable(handle):
        return handle()
    if not isinstance(handle, int):
        raise ValueError(f"synchronize: handle={shown(handle)}; expected what an _async function returned")
    found = _entries.get(handle)
    if found is None:
        return None
    try:
        return state.engine().wait(found)
    finally:
        if found.done.is_set():  # else it was interrupted, and may be waited for again
            forget(handle)


def synchronous(name: str, start: Callable[P, int]) -> Callable[P, Any]:
    """Return the function `name`, which waits for what `start` does and returns the result."""

    @functools.wraps(start)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return synchronize(start(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Do what `{start.__name__}` does, wait for it, and return the result."
    return call
