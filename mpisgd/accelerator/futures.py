"""Futures of tensors on a device, which order the streams of those that use them, as those of torch's NCCL.

A future that knows its devices remembers, when it is completed, what the current streams have to do. Whoever
waits for it lets its own streams wait for that, and callbacks run on streams that do. One that does not know
them orders nothing: its consumers read what is still in flight.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from mpisgd.accelerator.runtime import on_device, runtime

__all__ = ["all_done", "completed_on", "devices_of", "future_on", "tensors_in"]


def future_on(stream: Any) -> "Future[Any]":
    """Return a future of tensors on the device of a stream; see `completed_on`."""
    return Future(devices=[stream.device])


def completed_on(future: "Future[Any]", stream: Any, value: Any) -> "Future[Any]":
    """Complete a future with what is there when `stream` has done what it has to do by now; return it."""
    with runtime().on(stream):
        future.set_result(value)
    return future


def devices_of(tensors: Any) -> list[torch.device]:
    """Return the devices of all tensors in lists of lists."""
    return list(dict.fromkeys(tensor.device for tensor in tensors_in(tensors) if on_device(tensor)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value: itself, or those in lists of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def all_done(futures: "Sequence[Future[Any]]", result: Any) -> "Future[Any]":
    """Return a future of `result` that is complete when all futures are, and fails where one does."""
    both = torch.futures.collect_all(list(futures))  # which orders no streams
    devices = devices_of(result)

    def settle(done: "Future[list[Future[Any]]]") -> Any:
        for future in done.value():
            future.value()
        return result

    if not devices:
        return both.then(settle)
    joined: Future[Any] = Future(devices=[*devices])

    def settle_on_streams(done: "Future[list[Future[Any]]]") -> None:
        with contextlib.ExitStack() as streams:
            for device in devices:
                streams.enter_context(runtime().on(runtime().new_stream(device)))
            try:
                for future in done.value():
                    future.wait()
                joined.set_result(result)
            except Exception as exc:
                joined.set_exception(exc)

    both.then(settle_on_streams)
    return joined.then(lambda done: done.value())  # what a callback raises, C++ sees as an error
