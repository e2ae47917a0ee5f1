"""The timeline's start and end, which the engines of all ranks carry out once one of them is asked for it.

Horovod needs rank 0 alone for it, so programs call it there alone, or everywhere.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mpisgd.horovod.engine.request import Request
from mpisgd.timeline.session import close_timeline, open_timeline

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["AT_ONCE", "requested", "start_request", "stop_request"]


def start_request(path: str, mark_cycles: bool) -> Request:
    """Return what asks for a timeline."""
    return Request(f"start_timeline.{path}", "start_timeline", op=path, root=int(mark_cycles))


def stop_request() -> Request:
    """Return what asks for its end."""
    return Request("stop_timeline", "stop_timeline")


def requested(env: Mapping[str, str] = os.environ) -> Request | None:
    """Return what HOROVOD_TIMELINE asks for from the beginning on.

    DYNAMIC, without which Horovod lets no timeline be started later, asks for nothing.
    """
    path = env.get("HOROVOD_TIMELINE", "")
    if path in ("", "DYNAMIC"):
        return None
    return start_request(path, env.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def _start(request: Request, wire: "Communicator") -> None:
    open_timeline(request.op, wire, mark_cycles=request.root == 1)


def _stop(request: Request, wire: "Communicator") -> None:
    close_timeline()


AT_ONCE: dict[str, Callable[[Request, "Communicator"], None]] = {
    "start_timeline": _start,
    "stop_timeline": _stop,
}
