"""`BackendWork`: ours as torch's `Work`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from mpisgd.accelerator.futures import all_done
from mpisgd.core.work import Work
from mpisgd.torch_backend.compat import never_compiled
from mpisgd.transport.messages.message_work import MessageWork

__all__ = ["BackendWork"]


@never_compiled
class BackendWork(dist.Work):
    """What a method of the process group returns.

    Args:
        works: the operations under way; none where everything is done already.
        result: what the future will hold: the tensors that were written.

    Attributes:
        works: the operations it stands for.
    """

    def __init__(self, works: Sequence[Work], result: Any) -> None:
        super().__init__()
        self.works = works
        self._result = result
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when all is done; raise what went wrong, or CollectiveTimeout after `timeout`.

        A wait that ends early, at its timeout or by Ctrl-C, changes nothing: what is under way goes on.
        """
        limit_s = timeout.total_seconds() if timeout else None  # torch says 0 for none
        for work in self.works:
            work.wait(limit_s)
        if self._future is not None:
            self._future.wait()  # it comes after those of the operations
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the last operation is over; see `Work.when_done`."""
        if self.works:
            self.works[-1].when_done(callback)
        else:
            callback()

    def is_completed(self) -> bool:
        """Return whether all is done."""
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """Return whether all is done and nothing is known to have failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, None where there is none so far."""
        return next(filter(None, (work.error for work in self.works)), None)

    def get_future(self) -> "Future[Any]":
        """Return a future of the result; callbacks run on the thread that completes the last operation."""
        if self._future is None:
            self._future = self._chain([work.get_future() for work in self.works])
        return self._future

    def _chain(self, futures: "list[Future[Any]]") -> "Future[Any]":
        """Return a future that fails in C++ too where one of ours does.

        To C++ an error that Python's `set_exception` has put into a future is a value like others: DDP's
        reducer took it for a tensor and crashed. What a callback raises, C++ sees as an error.
        """
        if len(futures) == 1:
            return futures[0].then(lambda future: future.value())
        if futures:
            return all_done(futures, self._result)
        done: Future[Any] = Future()
        done.set_result(self._result)
        return done

    def result(self) -> Any:
        """Return the tensors that were written."""
        return self._result

    def source_rank(self) -> int:
        """Return the group rank that a received message came from."""
        work = self.works[-1]
        assert isinstance(work, MessageWork)
        assert work.source is not None
        return work.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait, as `wait()` does."""
        self.wait()
