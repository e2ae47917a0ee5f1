"""`open_nccl`: a communicator of NCCL among the ranks of a group, by torch's own process group.

torch would connect the ranks at their first operation, with the host inside NCCL, where a rank that never
comes cannot be told. So they are connected here, after they have agreed to come.

A group that is made when the world has a communicator gets one that is split from it: its ranks need not find
each other again. That is collective over the world, so it happens when the group is made, or never.
"""

import contextlib
import datetime
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from mpisgd.accelerator.runtime import runtime
from mpisgd.errors import NcclFailed
from mpisgd.transport.device.nccl import Nccl
from mpisgd.transport.device.nccl_options import fresh_options

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["can_split", "open_nccl", "stay_out"]

# torch ends the process by SIGABRT where an operation outlasts its timeout, where NCCL reports an error (as
# it does when a rank was lost), and where its watchdog gets no answer from CUDA for eight minutes: before any
# of our errors could be raised. So its timeout is never reached (NcclWatch has ours), after an error it ends
# the communicator and not the process (mode 2; mode 0 is taken for 3 under TORCH_DISTRIBUTED_DEBUG=DETAIL),
# and nothing watches its watchdog. It reads these variables while a process group is made, at no other time.
SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
NEVER = datetime.timedelta(days=1000)
COLOR = 0  # each split makes one communicator
_lock = threading.Lock()


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set these variables inside. Process groups that the program makes itself are as it wants them."""
    with _lock:
        before = {name: os.environ.get(name) for name in SETTINGS}
        os.environ.update(SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def open_nccl(
    group: "Group", store: Any, device: torch.device, parent: Nccl | None = None
) -> Nccl | NcclFailed:
    """Return NCCL among the ranks of a group, or what has failed. Collective: all have agreed to come.

    Args:
        group: its ranks.
        store: by which they find each other.
        device: where this rank's tensors lie.
        parent: the communicator to split it from, whose ranks all come here, or to `stay_out`.
    """
    options = fresh_options(group.pg_options or group.job.pg_options)
    options._timeout = NEVER
    if parent is not None:
        options.split_from, options.split_color = parent.inner, COLOR
    try:
        with _settings():
            inner = runtime().make_nccl(store, group.rank, group.size, options)
        inner.eager_connect_single_device(device)
    except RuntimeError as exc:
        return NcclFailed(f"group '{group.name}': NCCL cannot be opened: {exc}")
    return Nccl(group, inner, device, store)


def can_split(parent: object) -> bool:
    """Return whether torch can split communicators from that of a group, if it is one of NCCL."""
    return (
        isinstance(parent, Nccl)
        and bool(getattr(parent.inner, "supports_splitting", False))
        and hasattr(parent.inner, "perform_nocolor_split")
    )


def stay_out(parent: Nccl) -> None:
    """Take part in a split without being a member of what it makes."""
    parent.inner.perform_nocolor_split(parent.device)
