"""`rpc_sync`, `rpc_async`, `remote`: torch's, with waits that the stall monitor knows and ranks in errors."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpisgd.arguments import check_callable, shown
from mpisgd.errors import CollectiveTimeout, InvalidArgument, NotInitialized, PeerLost
from mpisgd.rpc.tensorpipe import available, check_references_work, is_running
from mpisgd.threads.wait_registry import WaitReason, waiting_for

__all__ = ["Future", "get_worker_info", "outstanding_calls", "remote", "rpc_async", "rpc_sync"]

UNSET_TIMEOUT = -1.0  # torch's sign for the timeout of `init_rpc`
# What torch says, in C++, where an answer did not come in time, and where a connection has ended.
TIMED_OUT = "RPC ran for more than set timeout"
CONNECTION_ENDED = "(this error originated at tensorpipe/"
RAISED_THERE = "On WorkerInfo("

_numbers = itertools.count()
_outstanding: dict[int, "Call"] = {}  # without an answer yet


class Call(NamedTuple):
    """A call of a function on another rank.

    Attributes:
        kind: `rpc_sync`.
        function: its name.
        worker: the name of the worker that runs it.
        rank: the rank of that worker.
    """

    kind: str
    function: str
    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.function} on {self.worker!r}"


def outstanding_calls() -> list[Call]:
    """Return the calls of this rank that have no answer yet, the oldest first."""
    return list(_outstanding.copy().values())


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Call a function on another rank and return its result.

    Args:
        to: a worker's name, its rank, or its WorkerInfo.
        func: a function that the other rank can import, or an operator of torch.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        timeout: in seconds; 0: no timeout; by default that of `init_rpc`.

    Raises:
        CollectiveTimeout: there is no answer in time.
        PeerLost: the connection to the rank has ended.
        InvalidArgument: there is no such worker; `func` cannot be called.
        NotInitialized: RPC does not run.
        UnsupportedTorch: an argument is an RRef, and RPC was started before in this process.
        RuntimeError: the function has raised an error; the message has its text and its traceback.
    """
    call = _prepare("rpc_sync", to, func, args, kwargs)
    with _awaited(call, _limit_s(timeout)):
        return available().rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> "Future":
    """Call a function on another rank and return a future at once; see `rpc_sync`."""
    call = _prepare("rpc_async", to, func, args, kwargs)
    future = Future(call, _limit_s(timeout))
    future.follow(available().rpc_async(to, func, args, kwargs, timeout))
    return future


def remote(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Call a function on another rank, where its result stays; return at once with an RRef to the result.

    See `rpc_sync`; errors of the function come when the RRef is used. RRefs work with the first start of RPC
    in a process only; later this raises UnsupportedTorch.
    """
    _prepare("remote", to, func, args, kwargs)
    check_references_work("remote")
    return available().remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: Any = None) -> Any:
    """Return the WorkerInfo (`name`; `id`, its rank) of a worker, given by name or rank; None: this one."""
    _check_running("get_worker_info")
    return available().get_worker_info() if worker_name is None else _worker("get_worker_info", worker_name)


class Future(torch.futures.Future[Any]):
    """The future that `rpc_async` returns: torch's, with a `wait()` that stall reports show."""

    def __init__(self, call: Call, limit_s: float) -> None:
        super().__init__(devices=available()._get_current_rpc_agent()._get_backend_options().devices)
        self._call = call
        self._limit_s = limit_s

    def follow(self, answer: "torch.futures.Future[Any]") -> None:
        """Take the result or the error of a future of torch when that is done."""
        number = next(_numbers)
        _outstanding[number] = self._call

        def settle(done: "torch.futures.Future[Any]") -> None:
            _outstanding.pop(number, None)
            try:
                self.set_result(done.value())
            except Exception as exc:
                self.set_exception(exc)

        answer.add_done_callback(settle)

    def wait(self) -> Any:
        """Wait for the function's result and return it; raises the errors of `rpc_sync`."""
        with _awaited(self._call, self._limit_s):
            return super().wait()


def _check_running(name: str) -> None:
    if not is_running():
        raise NotInitialized(f"{name}: RPC does not run; call mpisgd.rpc.init_rpc() on all ranks first")


def _prepare(kind: str, to: Any, func: Any, args: Any, kwargs: Any) -> Call:
    """Check the arguments of a call; return how messages tell of it."""
    _check_running(kind)
    check_callable(kind, "func", func)
    if any(isinstance(value, available().PyRRef) for value in (*(args or ()), *(kwargs or {}).values())):
        check_references_work(kind)
    info = _worker(kind, to)
    return Call(kind, getattr(func, "__qualname__", shown(func)), info.name, info.id)


def _worker(kind: str, to: Any) -> Any:
    api = available()
    if isinstance(to, api.WorkerInfo):
        return to
    try:
        return api.get_worker_info(to)
    except (RuntimeError, TypeError) as exc:
        infos = sorted(api._get_current_rpc_agent().get_worker_infos(), key=lambda info: int(info.id))
        names = ", ".join(info.name for info in infos)
        raise InvalidArgument(f"{kind}: there is no worker {shown(to)}; there are {names}") from exc


def _limit_s(timeout: float) -> float:
    """Return a call's timeout in seconds, as the stall monitor takes it."""
    seconds = available().get_rpc_timeout() if timeout == UNSET_TIMEOUT else timeout
    return float(seconds or threading.TIMEOUT_MAX)


@contextlib.contextmanager
def _awaited(call: Call, limit_s: float) -> Iterator[None]:
    """Report the wait for an answer; where none comes say whose it is."""
    try:
        with waiting_for(WaitReason(str(call), awaited=(call.rank,)), limit_s):
            yield
    except RuntimeError as exc:
        text = str(exc)
        if RAISED_THERE in text:
            raise
        if TIMED_OUT in text:
            raise CollectiveTimeout(f"{call}, rank {call.rank}: no answer after {limit_s:g} s") from None
        if CONNECTION_ENDED in text:
            reason = text.partition(CONNECTION_ENDED)[0].strip()
            raise PeerLost(f"{call}: the connection to rank {call.rank} has ended: {reason}") from exc
        raise
