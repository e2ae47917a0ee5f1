"""Streams of a group's own, one for each device and use; torch has 32, and then hands them out again."""

import threading
from typing import Any

import torch

from mpisgd.accelerator.runtime import runtime

__all__ = ["OwnStreams"]


class OwnStreams:
    """Made when they are first asked for, by any thread."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, torch.device], Any] = {}
        self._lock = threading.Lock()

    def get(self, use: str, device: torch.device) -> Any:
        """Return the stream of a device for one use: on one for several, each would come after the others."""
        with self._lock:
            if (use, device) not in self._streams:
                self._streams[use, device] = runtime().new_stream(device)
            return self._streams[use, device]
