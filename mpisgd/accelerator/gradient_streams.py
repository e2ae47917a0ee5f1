"""`GradientStreams`: the streams in which one backward has computed gradients on a device.

Autograd computes a gradient in the stream in which forward has used the parameter, and calls its hook there.
A bucket has gradients of several parameters, and is packed in the stream of the last one, or by the thread of
another device:

    stream A   | gradient of a ........... |
    stream B   | gradient of b |            * pack [a b]

At the end of backward torch lets the stream of its caller wait for all of them.
"""

from typing import Any

from torch import Tensor

from mpisgd.accelerator.runtime import on_device, runtime

__all__ = ["GradientStreams"]


class GradientStreams:
    """Knows of none at first. Its owner sees to it that one thread at a time calls it."""

    def __init__(self) -> None:
        self._streams: dict[Any, None] = {}

    def note(self, param: Tensor) -> None:
        """Note that the gradient of a parameter has just been queued on this thread's current stream."""
        if on_device(param):
            self._streams[runtime().current_stream(param.device)] = None

    def join(self) -> None:
        """Let this thread's current streams come after all that these streams have to do by now."""
        for stream in list(self._streams):
            current = runtime().current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
                self._streams[current] = None
