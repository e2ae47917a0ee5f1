"""Events of torch's profilers: `mpisgd:all_reduce` and so on, named as those of torch's own CPU backend.

There an event begins in C++ and is marked as asynchronous: it lasts until the operation is over, and its time
is not part of what encloses it. From Python an event counts as asynchronous where another thread ends it than
began it, so that is what is done here.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, autograd
from torch.utils._pytree import tree_leaves

from mpisgd.config import BACKEND
from mpisgd.torch_backend.work import BackendWork

__all__ = ["with_profiler_events"]

C = TypeVar("C", bound=type)

# By method: what torch calls its events, and which argument holds what this rank gives. The method that
# allgather_coalesced calls records it.
TITLES: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recvAnySource", 0),
}

_torch: Any = autograd  # which exports these in silence
_is_profiling: Callable[[], bool] = _torch._profiler_enabled
_enter: Callable[..., Any] = _torch._record_function_with_args_enter
_exit: Callable[[Any], None] = _torch._record_function_with_args_exit


def with_profiler_events(cls: C) -> C:
    """Let a process group's methods be seen by torch's profilers. Without one, that costs a function call."""
    for name, (title, place) in TITLES.items():
        setattr(cls, name, _recorded(getattr(cls, name), title, place))
    return cls


def _recorded(method: Callable[..., BackendWork], title: str, place: int | None) -> Callable[..., Any]:
    @functools.wraps(method)
    def record(self: Any, *args: Any, **kwargs: Any) -> BackendWork:
        if not _is_profiling():
            return method(self, *args, **kwargs)
        given: list[Tensor] = tree_leaves(args[place]) if place is not None and place < len(args) else []
        sparse = "sparse_" if any(tensor.is_sparse for tensor in given) else ""
        end = _begin(f"{BACKEND}:{sparse}{title}", given)
        try:
            work = method(self, *args, **kwargs)
        except BaseException:
            end()
            raise
        work.when_done(end)
        return work

    return record


def _begin(title: str, given: list[Tensor]) -> Callable[[], None]:
    """Begin an event on this thread; return what ends it, on whichever thread."""
    record, began = _enter(title, *given), threading.get_ident()

    def end() -> None:
        if threading.get_ident() != began:
            _exit(record)
        else:
            other = threading.Thread(target=_exit, args=(record,), name="mpisgd profiler")
            other.start()
            other.join()

    return end
