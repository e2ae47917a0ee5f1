"""`DeviceMessages`: a group's messages from GPUs, by NCCL where the other end has one, else by the host.

    sender                      receiver
    announcement  ---------->   matched by MPI like any message: source, tag, order
                  <----------   go: both have a GPU; NCCL receives      or  host: MPI receives
    NCCL sends                                                              or  refuse: another size
                                                                                MPI sends

The announcement is sent by the tag of the message, the rest by two tags above those of programs. In each
direction between two ranks, NCCL's operations are launched in the order of the receiver's words, and MPI's
messages sent. All that happens while the host waits for messages, and in a thread while one is under way:
what the GPU of a receiver waits for may keep the sender's host from ever coming back to us.
"""

import itertools
import pickle
import threading
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device, runtime
from mpisgd.arguments import ranks_text
from mpisgd.dtypes import dtype_name
from mpisgd.errors import MpisgdError, ShapeMismatch, afresh
from mpisgd.interfaces.communicator import Request
from mpisgd.transport.device.channel import Channel, Route
from mpisgd.transport.device.selection import NCCL, warn_of_host_memory
from mpisgd.transport.device.transfer import Incoming, Outgoing
from mpisgd.transport.messages.announcement import ANNOUNCEMENT_BYTES, Announcement
from mpisgd.transport.messages.message_work import MessageWork
from mpisgd.transport.messages.point_to_point import PointToPoint

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["DeviceMessages"]


class DeviceMessages:
    """See the module. Of each group, where any rank of the job has NCCL: opened by the first message.

    Args:
        group: the group.

    Attributes:
        communicator: of the group's messages.
        data_tag: of what goes through host memory after all.
        lock: of all transfers. MPI and NCCL are called with it, and nothing is waited for.
    """

    def __init__(self, group: "Group") -> None:
        self.group = group
        self.lock = threading.RLock()
        messages: PointToPoint = group.point_to_point
        self._messages = messages
        self.communicator = messages.communicator
        self.data_tag = messages.tag_limit + 1
        self._word_tag = messages.tag_limit + 2
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, Outgoing] = {}  # not launched yet
        self._channels: dict[Route, Channel] = {}
        self._told: list[tuple[Request, Tensor]] = []
        self._word: tuple[Request, Tensor] | None = None  # that is being received

    # -- as messages begin ------------------------------------------------------------------------------

    @property
    def are_expected(self) -> bool:
        """Whether a rank of the group may announce a message; the same on all."""
        return self.group.job.gpu != "mpi" and self._messages.threads_allowed

    def announces(self, tensor: Tensor, dst: int) -> bool:
        """Return whether a message to a group rank is announced; not if it is short, or to this rank."""
        if dst == self.communicator.rank or tensor.numel() * tensor.element_size() <= ANNOUNCEMENT_BYTES:
            return False
        if obstacle := self._obstacle(tensor):
            warn_of_host_memory(obstacle)
        return obstacle == ""

    def _obstacle(self, tensor: Tensor) -> str | None:
        """Return why a tensor cannot travel by NCCL, "" where it can; None where nobody expects it."""
        of_collectives = self.group.device
        if not on_device(tensor) or self.group.job.gpu == "mpi":
            return None
        if of_collectives is not None and of_collectives.selection.name != NCCL:
            return None
        if not runtime().has_nccl():
            return f"the torch of rank {self.group.ranks[self.group.rank]} has no NCCL"
        if not self._messages.threads_allowed:
            return "messages by NCCL need an MPI that runs at thread level MULTIPLE"
        return ""

    def _shared(self, tensor: Tensor, announced: Announcement, src: int) -> str:
        """Return "" where the ends have GPUs of their own, else what NCCL would say."""
        group, where = self.group, self.group.topology
        if src not in where.nodes[where.node_rank] or announced.gpu != _checksum(tensor.device):
            return ""
        names = sorted((group.ranks[src], group.ranks[group.rank]))
        return f"{ranks_text(names)} share one GPU, where NCCL needs one for each"

    def check(self) -> None:
        """Raise what has ended NCCL in this group, which a host that waited for the GPU has not seen."""
        of_collectives, broken = self.group.device, self.group.queue.broken
        has_nccl = of_collectives is not None and of_collectives.selection.name == NCCL
        if broken is not None and (has_nccl or self._channels):
            raise afresh(broken)

    def send(self, tensor: Tensor, dst: int, tag: int) -> MessageWork:
        """Announce a message to a group rank."""
        transfer = Outgoing(self, next(self._numbers), dst, tensor)
        place, gpu = tensor.device.index or 0, _checksum(tensor.device)
        packed = Announcement(transfer.number, transfer.nbytes, place, gpu, dtype_name(tensor.dtype)).packed()
        with self.lock:
            self._outgoing[transfer.number] = transfer
        return self._messages.send("send", packed, dst, tag, transfer.tensors, transfer=transfer)

    def receive(self, work: MessageWork, announced: Announcement, src: int) -> Incoming:
        """Say how an announced message is to come, and begin that.

        Args:
            work: of its receiver.
            announced: what came.
            src: its group rank.
        """
        tensor, staged = work.tensors[0], work.memory
        transfer = Incoming(self, announced.number, src, tensor, work.ready, staged)
        obstacle = self._obstacle(tensor)
        if obstacle == "":
            obstacle = self._shared(tensor, announced, src)
        with self.lock:
            if announced.nbytes != transfer.nbytes:
                text = self._other_size(work, announced, transfer)
                transfer.error = ShapeMismatch(text)
                self._tell(src, "refuse", announced.number, text)
            elif obstacle == "" and (channel := self._channel_to(tensor, announced, src)) is not None:
                self._tell(src, "go", announced.number, channel.route)
                channel.put(transfer)
            else:
                self._receive_by_host(transfer)
        if obstacle:
            warn_of_host_memory(obstacle)
        return transfer

    def _other_size(self, work: MessageWork, announced: Announcement, transfer: Incoming) -> str:
        names, tensor = self.communicator.global_ranks, transfer.tensor
        return (
            f"recv: rank {names[transfer.peer]} sends {announced.nbytes} bytes of {announced.dtype}; the "
            f"tensor of rank {names[self.communicator.rank]} has {transfer.nbytes} ({list(tensor.shape)} of "
            f"{dtype_name(tensor.dtype)}, tag {work.message.tag})"
        )

    def _channel_to(self, tensor: Tensor, announced: Announcement, src: int) -> Channel | None:
        """Return the channel of an announced message; None where its ends cannot be connected."""
        route = Route(src, self.communicator.rank, announced.device, tensor.device.index or 0)
        channel = self._channel(route)
        return None if channel.failed else channel

    def _channel(self, route: Route) -> Channel:
        if route not in self._channels:
            index = route.src_device if route.src == self.communicator.rank else route.dst_device
            device = torch.device(runtime().kind, index)
            self._channels[route] = Channel(self.group, route, device, self._tell)
        return self._channels[route]

    def _receive_by_host(self, transfer: Incoming) -> None:
        self._tell(transfer.peer, "host", transfer.number)
        transfer.by_host()

    # -- what the ends tell each other ------------------------------------------------------------------

    def _tell(self, rank: int, word: str, *about: Any) -> None:
        told = torch.frombuffer(bytearray(pickle.dumps((word, *about))), dtype=torch.uint8)
        with self.lock:
            self._told = [each for each in self._told if not self.communicator.poll([each[0]])]
            self._told.append((self.communicator.isend(told, rank, self._word_tag), told))

    def _next_word(self) -> tuple[int, list[Any]] | None:
        """Return from whom the next word is, and what it says; None where none has come."""
        if self._word is None:
            if (found := self.communicator.probe(self._word_tag)) is None:
                return None
            src, tag, nbytes = found
            memory = torch.empty(nbytes, dtype=torch.uint8)
            self._word = self.communicator.irecv(memory, src, tag), memory
        request, memory = self._word
        if (outcome := self.communicator.poll_one(request)) is None:
            return None
        self._word = None
        return outcome[0], list(pickle.loads(memory.numpy().tobytes()))

    def progress(self) -> None:
        """Do what the other ends have said, in order, and go on connecting."""
        with self.lock:
            while (found := self._next_word()) is not None:
                src, (word, *about) = found
                self._handle(src, word, *about)
            for channel in self._channels.values():
                if not channel.is_open and not channel.failed:
                    self._connect(channel)

    def _handle(self, src: int, word: str, *about: Any) -> None:
        """Do as the other end has said."""
        if word in ("go", "host", "refuse"):
            self._handle_message(word, *about)
            return
        channel = self._channels[Route(*about[0])]
        if word == "store":
            channel.store.handle(*about[1:])
        elif word == "connected":
            channel.theirs = about[1]
        elif word == "open":
            for transfer in channel.waiting:
                self._outgoing.pop(transfer.number, None)
            channel.open()
        elif word == "fail":
            channel.fail(about[1])
            channel.waiting.clear()  # the receiver has said of each how it comes

    def _handle_message(self, word: str, number: int, *about: Any) -> None:
        channel = self._channel(Route(*about[0])) if word == "go" else None
        transfer = self._outgoing.get(number)
        if transfer is None:  # given up here
            return
        if channel is not None:
            channel.put(transfer)
            if not channel.is_open:
                return  # it may come through host memory yet
        elif word == "host":
            transfer.by_host()
        else:
            transfer.error = ShapeMismatch(about[0])
        del self._outgoing[number]

    def _connect(self, channel: Channel) -> None:
        """Go on where the ends are being connected: the receiver opens the channel, or gives it up."""
        route = tuple(channel.route)
        if channel.sends:
            if channel.mine is not None and not channel.has_told:
                channel.has_told = True
                self._tell(channel.peer, "connected", route, channel.mine)
        elif wrong := channel.mine or channel.theirs:
            self._tell(channel.peer, "fail", route, wrong)
            channel.fail(wrong)
            while channel.waiting:
                transfer = channel.waiting.popleft()
                assert isinstance(transfer, Incoming)
                self._receive_by_host(transfer)
            names = self.group.ranks
            warn_of_host_memory(
                f"NCCL cannot connect ranks {names[channel.route.src]} and {names[channel.route.dst]} for "
                f"messages: {wrong}"
            )
        elif channel.mine is not None and channel.theirs is not None:
            self._tell(channel.peer, "open", route)
            channel.open()

    # -- the end ----------------------------------------------------------------------------------------

    def abandon(self, error: MpisgdError) -> None:
        """Break off what is in flight on GPUs, which raises `error` from now on. From any thread."""
        for channel in list(self._channels.values()):
            channel.abandon(error)

    def close(self) -> None:
        """End all communicators, when what is in flight is done. Collective."""
        for route in sorted(self._channels):  # in one order on all ranks: NCCL may wait for the other end
            self._channels.pop(route).close()


def _checksum(device: torch.device) -> int:
    """Return a checksum of what tells a GPU from the others of its host."""
    return zlib.crc32(runtime().identity(device).encode())
