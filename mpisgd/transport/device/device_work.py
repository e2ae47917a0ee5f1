"""`DeviceWork`: operations that are work on a device, and what follows them there, once."""

import abc
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpisgd.accelerator.futures import completed_on, future_on, tensors_in
from mpisgd.accelerator.runtime import runtime
from mpisgd.core.submission import inference_mode_of
from mpisgd.core.work import Work

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["DeviceWork"]


class DeviceWork(Work):
    """A Work whose `wait()` lets the current stream wait, and not the host.

    Args:
        finish: what follows the operations, on the stream of whoever waits first.
        group: of the operations.
        tensors: what the future holds.
        memory: what the operations use; it may belong to another stream than the one that waits.
        device: where they lie.

    Attributes:
        finished: an event that comes after all of it, once somebody has waited.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        *,
        group: "Group",
        tensors: Any,
        memory: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._finish: Callable[[], None] | None = finish
        self._streams = group.streams
        self._result = tensors
        self._memory = memory
        self._device = device
        self.finished: Any = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.RLock()

    @abc.abstractmethod
    def follow(self, timeout_s: float | None = None) -> None:
        """Let the current stream come after the operations; with a limit the host waits for them.

        Raises:
            CollectiveTimeout: they were not over in time; they go on.
            MpisgdError: they failed.
        """

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Work` and `follow`."""
        self.follow(timeout_s)
        self.finish_once()
        return True

    def finish_once(self) -> None:
        """Do the rest on the current stream, or let it wait for the stream that has done it."""
        stream = runtime().current_stream(self._device)
        with self._lock:
            if self.finished is not None:
                stream.wait_event(self.finished)
                return
            if self._finish is not None:
                with inference_mode_of(self._memory):
                    self._finish()
            self.finished = stream.record_event()
            # What belongs to another stream is not handed out there before this one is done with it.
            for tensor in (*self._memory, *tensors_in(self._result)):
                tensor.record_stream(stream)
            self._finish, self._memory = None, ()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that is complete at once, for streams that wait for it; see `completed_on`."""
        with self._lock:
            if self._future is None:
                stream = self._streams.get("results", self._device)
                self._future = future_on(stream)
                try:
                    with runtime().on(stream):
                        self.wait()
                except Exception as exc:
                    self._future.set_exception(exc)
                else:
                    completed_on(self._future, stream, self._result)
            return self._future
