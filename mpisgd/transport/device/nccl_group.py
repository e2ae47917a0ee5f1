"""`open_nccl`: a communicator of NCCL among the ranks of a group, by torch's own process group.

torch would connect the ranks at their first operation, with the host inside NCCL, where a rank that never
comes cannot be told. So they are connected here, after they have agreed to come, on a thread of its own: what
one rank cannot do the others are told of, which would wait for it inside NCCL.

A group that is made when the world has a communicator gets one that is split from it: its ranks need not find
each other again. That is collective over the world, so it happens when the group is made, or never.
"""

import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpisgd.accelerator.runtime import runtime
from mpisgd.errors import NcclFailed
from mpisgd.threads.service_thread import InheritingThread
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.device.nccl import Nccl
from mpisgd.transport.device.nccl_options import fresh_options

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["can_split", "connect_all", "made_nccl", "open_nccl", "split_nccl"]

# torch ends the process by SIGABRT where an operation outlasts its timeout, where NCCL reports an error (as
# it does when a rank was lost), and where its watchdog gets no answer from CUDA for eight minutes: before any
# of our errors could be raised. So its timeout is never reached (NcclWatch has ours), after an error it ends
# the communicator and not the process (mode 2; mode 0 is taken for 3 under TORCH_DISTRIBUTED_DEBUG=DETAIL),
# and nothing watches its watchdog. It reads these variables while a process group is made, at no other time.
SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
NEVER = datetime.timedelta(days=1000)
COLOR = 0  # each split makes one communicator
FAILED_TAG = 41  # of the queue's communicator, beside the consistency check's
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


def made_nccl(group: "Group", store: Any, rank: int, size: int, parent: Nccl | None = None) -> Any:
    """Return torch's process group with the options of a group, which has not connected its ranks yet.

    Args:
        group: see `open_nccl`, as for `store` and `parent`.
        rank: of this process there.
        size: number of ranks.
    """
    options = fresh_options(group.pg_options or group.job.pg_options)
    options._timeout = NEVER
    if parent is not None:
        options.split_from, options.split_color = parent.inner, COLOR
    with _settings():
        return runtime().make_nccl(store, rank, size, options)


def open_nccl(group: "Group", store: Any, device: torch.device) -> Nccl | NcclFailed:
    """Return NCCL among the ranks of a group, or what has failed. Collective: all have agreed to come.

    Args:
        group: its ranks.
        store: by which they find each other.
        device: where this rank's tensors lie.
    """
    made: list[Any] = []

    def connect() -> None:
        made.append(made_nccl(group, store, group.rank, group.size))
        made[0].eager_connect_single_device(device)

    error = connect_all(group, connect)
    if error is None:
        return Nccl(group, made[0], device, store)
    for inner in made:
        inner.abort()
    return error


def split_nccl(
    world: "Group", group: "Group", parent: Nccl, begin_anew: Callable[[], None]
) -> Nccl | NcclFailed | None:
    """Return NCCL among the ranks of a new group, split from the world's, or what has failed on any rank.

    Collective over the world; None on a rank that is no member. Inside ncclCommSplit a host waits for all
    ranks of the world. So they agree that each can come before anyone does; NCCL splits nothing while the
    communicator is in use.

    Args:
        world: whose ranks all have told that they `can_split`.
        group: the new one.
        parent: the world's.
        begin_anew: ends it; called on all ranks where some may be left inside of it.
    """
    store = parent.store_of_split()
    made: list[Any] = []

    def split() -> None:
        if group.rank >= 0:
            made[0].eager_connect_single_device(parent.device)
        else:
            parent.inner.perform_nocolor_split(parent.device)

    with contextlib.ExitStack() as until_split:
        mine = ""
        try:
            until_split.enter_context(parent.quiet())
            if group.rank >= 0:
                made.append(made_nccl(group, store, group.rank, group.size, parent))
        except Exception as exc:
            mine = str(exc) or repr(exc)
        error = _failure(world, group.name, world.queue.communicator.all_gather_object(mine))
        if error is None and (error := connect_all(world, split, group.name)) is not None:
            begin_anew()
    if error is None:
        return Nccl(group, made[0], parent.device, store) if made else None
    for inner in made:
        inner.abort()
    return error


def connect_all(group: "Group", connect: Callable[[], None], name: str = "") -> NcclFailed | None:
    """Return None where `connect` has returned on every rank, else the error; the same on all. Collective.

    Args:
        group: its ranks, which have agreed to come.
        connect: meets the others inside NCCL; run on a thread of its own, which is left alone where it
            cannot return since another rank has failed.
        name: of the group that is connected, where it is another one.

    Raises:
        PeerLost: a rank was lost meanwhile.
    """
    communicator, ended = group.queue.communicator, []

    def run() -> None:
        try:
            connect()
        except Exception as exc:
            ended.append(str(exc) or repr(exc))
        else:
            ended.append("")

    def is_known() -> bool:
        return bool(ended) or communicator.probe(FAILED_TAG) is not None

    InheritingThread(target=run, name="mpisgd connects NCCL", daemon=True).start()
    limit_s = group.queue.consistency.timeout_s
    reason = WaitReason("the other ranks (NCCL connects)", group.name, (), group.ranks)
    if not Backoff(limit_s).wait_for(is_known, about=lambda: reason):
        ended.append(f"not connected after {limit_s:g} s")
    mine = ended[0] if ended else None  # None: another one has failed, and this one waits inside NCCL
    if mine:
        told = torch.zeros(1, dtype=torch.uint8)
        others = [rank for rank in range(group.size) if rank != group.rank]
        communicator.abandon([communicator.isend(told, rank, FAILED_TAG) for rank in others], told)
    everyones = communicator.all_gather_object(mine)
    _receive_all(group, [rank for rank, text in enumerate(everyones) if text and rank != group.rank])
    return _failure(group, name or group.name, everyones)


def _failure(group: "Group", name: str, everyones: Sequence[str | None]) -> NcclFailed | None:
    """Return the error of all ranks of a group where one has said what has failed."""
    wrong = [f"rank {rank}: {text}" for rank, text in zip(group.ranks, everyones, strict=True) if text]
    if not wrong:
        return None
    error = NcclFailed(f"group '{name}': NCCL cannot be opened: {'; '.join(wrong[:4])}")
    error.on_every_rank = True
    return error


def _receive_all(group: "Group", ranks: Sequence[int]) -> None:
    """Take what failed ranks have sent, which the next opening must not find."""
    communicator = group.queue.communicator
    words = [torch.zeros(1, dtype=torch.uint8) for _ in ranks]
    requests = [communicator.irecv(word, rank, FAILED_TAG) for word, rank in zip(words, ranks, strict=True)]
    Backoff(group.queue.consistency.timeout_s).wait_for(lambda: communicator.poll(requests))


def can_split(parent: object) -> bool:
    """Return whether torch can split communicators from that of a group, if it is one of NCCL."""
    return (
        isinstance(parent, Nccl)
        and bool(getattr(parent.inner, "supports_splitting", False))
        and hasattr(parent.inner, "perform_nocolor_split")
    )
