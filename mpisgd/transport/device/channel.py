"""`Channel`: messages from a GPU of one rank to a GPU of another, by a communicator of NCCL of their own.

Messages stand outside the order of collectives, and so does their communicator: in one of the group a message
would wait for the collectives before it. Each direction has its own, in which both ranks launch in the order
that the receiver has chosen, so that two ranks that send to each other do not wait. A message is NCCL's
broadcast among these two: torch's `send` would connect the pair once more, at the first one, with the host
inside NCCL.

Two ranks are connected by a thread, at their first message: three ranks of which each waits for the next
one's host would wait for ever.
"""

import collections
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import runtime
from mpisgd.core.consistency import Operation
from mpisgd.core.submission import inference_mode_of
from mpisgd.errors import MpisgdError, NcclFailed
from mpisgd.threads.service_thread import InheritingThread
from mpisgd.transport.device.nccl import NcclWork
from mpisgd.transport.device.nccl_group import made_nccl
from mpisgd.transport.device.nccl_watch import InFlight, watch
from mpisgd.transport.device.pair_store import PairStore
from mpisgd.transport.device.transfer import Transfer

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["Channel", "Route"]

SENDER, RECEIVER = 0, 1  # ranks of the communicator


class Route(NamedTuple):
    """From where to where: ranks of the group, and the indices of their devices."""

    src: int
    dst: int
    src_device: int
    dst_device: int


class Channel:
    """One route as one of its two ranks sees it. Its owner's lock is held in all methods.

    Args:
        group: of both ranks.
        route: of the messages.
        device: this rank's end of it.
        tell: sends words to a rank of the group, which calls `handle` of its end's `store` with them. Called
            from any thread.

    Attributes:
        store: by which torch connects the ends.
        sends: whether this rank is its beginning.
        mine, theirs: what has become of the connection at this end and at the other one: None while that is
            not known, "" where it is there, else what has failed.
        is_open: whether messages can be launched.
        failed: why they go through host memory.
        waiting: for the channel to be open, in order.
    """

    def __init__(self, group: "Group", route: Route, device: torch.device, tell: Callable[..., None]) -> None:
        self.group, self.route, self.device = group, route, device
        self.sends = route.src == group.rank
        self.mine: str | None = None
        self.theirs: str | None = None
        self.has_told = False
        self.is_open = False
        self.failed = ""
        self.waiting: collections.deque[Transfer] = collections.deque()
        self._inner: Any = None
        self._in_flight: InFlight | None = None
        self.store = PairStore(
            has_table=self.sends,
            tell=functools.partial(tell, self.peer, "store", tuple(route)),
            timeout_s=group.queue.consistency.timeout_s,
        )
        InheritingThread(target=self._connect, name="mpisgd connects NCCL", daemon=True).start()

    @property
    def peer(self) -> int:
        """The group rank of the other end."""
        return self.route.dst if self.sends else self.route.src

    def _connect(self) -> None:
        """Meet the other rank, in a thread of its own."""
        try:
            self._inner = made_nccl(self.group, self.store.store, SENDER if self.sends else RECEIVER, 2)
            self._inner.eager_connect_single_device(self.device)
        except Exception as exc:
            self.mine = str(exc) or repr(exc)
        else:
            self.mine = ""
            if self.failed:  # meanwhile, at the other end
                self._inner.abort()

    def open(self) -> None:
        """Launch what has waited, in order, since both ends are connected."""
        self.is_open = True
        self.store.connected()
        self._in_flight = InFlight(self.group, self._inner, self.group.ranks[self.peer])
        watch(self._in_flight)
        while self.waiting:
            self._launch(self.waiting.popleft())

    def fail(self, why: str) -> None:
        """Give the connection up."""
        self.failed = why
        self.store.close()
        if self._inner is not None:
            self._inner.abort()

    def put(self, transfer: Transfer) -> None:
        """Launch a message now, or once the channel is open."""
        if self.is_open:
            self._launch(transfer)
        else:
            self.waiting.append(transfer)

    def _launch(self, transfer: Transfer) -> None:
        """Let NCCL move a tensor, after what the caller's stream had to do at the call."""
        assert self._in_flight is not None
        # Of this route alone: on a shared stream a message would come after what others wait for.
        stream = self.group.streams.get(f"messages {tuple(self.route)}", self.device)
        operation = Operation("send" if self.sends else "recv", extra=f"rank {self._in_flight.partner}")
        try:
            with runtime().on(stream), inference_mode_of(transfer.tensors):
                stream.wait_event(transfer.ready)
                flat, finish = transfer.memory_on_device()
                begun = self._inner.broadcast(flat.view(torch.uint8), SENDER)
        except RuntimeError as exc:
            transfer.error = self._in_flight.or_its_error(NcclFailed(f"{operation}: {exc}"))
            return
        launched = self._in_flight.add(operation, [begun])
        memory: list[Tensor] = [flat]
        transfer.begun = NcclWork(
            launched,
            [begun],
            finish,
            self._in_flight,
            tensors=transfer.tensors,
            memory=memory,
            device=self.device,
        )

    def abandon(self, error: MpisgdError) -> None:
        """Break off what is in flight, which raises `error` from now on."""
        if self._in_flight is not None:
            watch(self._in_flight, end=True)
            self._in_flight.end(error)
        else:
            self.store.close()
            if self._inner is not None:
                self._inner.abort()

    def close(self) -> None:
        """End the communicator, when all is done. Both ranks come."""
        if self._in_flight is not None:
            watch(self._in_flight, end=True)
            if self._in_flight.error is None:
                self._inner.shutdown()
