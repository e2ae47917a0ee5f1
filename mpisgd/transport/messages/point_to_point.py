"""A group's point-to-point messages, outside the queue's order and on a communicator of their own.

MPI moves large messages only while it is called, so a started message makes progress in `wait()`,
in `is_completed()`, or in the background once its future was asked for.

A message between devices may be announced, and come otherwise than by MPI; see message_work.py.
"""

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import (
    CollectiveMismatch,
    MpiFailed,
    MpisgdError,
)
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.threads import wait_registry
from mpisgd.threads.calling_thread import check_calling_thread
from mpisgd.threads.scheduling import now_s, sleep
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.threads.wait_registry import Message
from mpisgd.threads.waiting import Backoff, add_pending_message, pause_s, remove_pending_message
from mpisgd.transport.messages.announcement import ANNOUNCEMENT_BYTES
from mpisgd.transport.messages.message_work import InFlight, MessageWork, Transfer

__all__ = ["PointToPoint"]

UNRECEIVED_S = 3.0  # what was received in time has been acknowledged by then
# With more messages in flight, those that nobody waits for are polled, too: so many of them at each new one.
MAX_UNPOLLED, POLLED_AT_ONCE = 64, 4
NUM_OWN_TAGS = 2  # the largest, for what ranks tell each other of announced messages


class PointToPoint:
    """The messages in flight between this rank and the others of a group.

    Args:
        communicator: a communicator of its own.
        timeout_s: how long `wait()` waits by default.
        threads_allowed: whether futures, which need a thread, can be had.

    Attributes:
        num_ended: how many messages have ended.
        num_received: how many have come from each global rank.
        group: name and global ranks of the group, for reports of what this rank waits for.
        elsewhere: what brings announced messages, `mpisgd.transport.device.messages.DeviceMessages`; None
            where no rank of the job announces any.
        threads_allowed: see above.
    """

    def __init__(self, communicator: GroupCommunicator, *, timeout_s: float, threads_allowed: bool) -> None:
        self.communicator = communicator
        self.num_ended = 0
        self.group: tuple[str, Sequence[int]] = ("", range(communicator.size))
        self.timeout_s = timeout_s
        self.elsewhere: Any = None
        self.threads_allowed = threads_allowed
        self._in_flight: collections.OrderedDict[MessageWork, None] = collections.OrderedDict()
        self._watched: set[MessageWork] = set()
        self._lock = threading.Lock()
        self._thread: ServiceThread | None = None  # completes the watched ones; the last, where it has ended
        self._is_watching = False
        self._progress_s = 0.0  # when it last completed one
        self._num_sent: collections.Counter[int] = collections.Counter()  # by global rank
        self.num_received: collections.Counter[int] = collections.Counter()

    @property
    def tag_limit(self) -> int:
        """The largest tag of a program."""
        return self.communicator.tag_limit - NUM_OWN_TAGS

    def send(
        self, name: str, memory: Tensor, dst: int, tag: int, tensors: Any, *, transfer: Transfer | None = None
    ) -> MessageWork:
        """Start sending contiguous `memory` to group rank `dst`; `transfer`: what it announces."""
        check_calling_thread(self.communicator.only_thread, name)
        request = self.communicator.isend(memory, dst, tag)
        name = f"{name} to rank {self.communicator.global_ranks[dst]}"
        message = Message(self.group[0], False, (self.communicator.global_ranks[dst],), tag)
        self._num_sent[message.partners[0]] += 1
        work = MessageWork(self, name, message, request, (memory, tensors), None, transfer=transfer)
        self._keep(work)
        if transfer is not None:
            self.watch(work)
        return work

    def receive(
        self,
        name: str,
        memory: Tensor,
        src: int | None,
        tag: int,
        tensors: Any,
        arrived: Callable[[int], None],
        *,
        ready: Any = None,
    ) -> MessageWork:
        """Start receiving into contiguous `memory`; `arrived(nbytes)` runs when the message is there.

        `ready`: the event after which the tensor may be touched, where that lies on a device.
        """
        check_calling_thread(self.communicator.only_thread, name)
        are_announced = self.elsewhere is not None and self.elsewhere.are_expected
        if are_announced and memory.nbytes < ANNOUNCEMENT_BYTES:
            memory, arrived = _with_room(memory, arrived)
        request = self.communicator.irecv(memory, src, tag)
        global_ranks = self.communicator.global_ranks
        source = "any rank" if src is None else f"rank {global_ranks[src]}"
        partners = self._others if src is None else (global_ranks[src],)
        message = Message(self.group[0], True, partners, tag)
        name = f"{name} from {source}"
        work = MessageWork(self, name, message, request, (memory, tensors), arrived, ready=ready)
        self._keep(work)
        if ready is not None and are_announced:
            self.watch(work)
        return work

    @functools.cached_property
    def _others(self) -> tuple[int, ...]:
        """The global ranks of all members but this one."""
        me, names = self.communicator.rank, self.communicator.global_ranks
        return tuple(name for rank, name in enumerate(names) if rank != me)

    def in_flight(self) -> list[Message]:
        """Return the messages in flight, as other ranks are told of them."""
        with self._lock:
            return [work.message for work in self._in_flight]

    def last_words(self) -> InFlight:
        """Return the messages, in flight, that tell the other ranks of the end of the group."""
        return InFlight(self.in_flight(), dict(self._num_sent))

    def _keep(self, work: MessageWork) -> MessageWork:
        """Hold the message (and its memory) until it is done, also if the caller forgets it."""
        wait_registry.mark_communicating()
        with self._lock:
            unpolled = self._oldest() if len(self._in_flight) >= MAX_UNPOLLED else []
            self._in_flight[work] = None
            add_pending_message(work)
        for other in unpolled:
            other.is_completed()
        return work

    def _oldest(self) -> list[MessageWork]:
        """Return those that have not been polled for longest, which come last from now on."""
        oldest = list(itertools.islice(self._in_flight, POLLED_AT_ONCE))
        for work in oldest:
            self._in_flight.move_to_end(work)
        return oldest

    def has_received(self, src: int) -> None:
        """Note that a message has come from group rank `src`."""
        self.num_received[self.communicator.global_ranks[src]] += 1

    def release(self, work: MessageWork) -> None:
        """Forget a message that is done."""
        with self._lock:
            self.num_ended += 1
            self._in_flight.pop(work, None)
            remove_pending_message(work)

    def watch(self, work: MessageWork) -> None:
        """See to it that `work` ends without anyone waiting for it."""
        if not self.threads_allowed:
            raise MpiFailed("the future of a message needs an MPI that runs at thread level MULTIPLE")
        with self._lock:
            self._watched.add(work)
            self._progress_s = now_s()
            if not self._is_watching:
                self._is_watching = True
                self._thread = ServiceThread("mpisgd messages", self._poll_watched)
                self._thread.start()

    def _poll_watched(self) -> bool:
        """One round of the thread: ask after the watched messages, however long they take.

        The loss of a rank ends each of them by itself, where it does.
        """
        with self._lock:
            watched = list(self._watched)
        ended = {work for work in watched if work.is_through()}
        with self._lock:
            self._watched -= ended
            self._is_watching = goes_on = bool(self._watched)
        if ended:
            self._progress_s = now_s()
        elif goes_on:
            sleep(pause_s(now_s() - self._progress_s))
        return goes_on

    @property
    def is_watching_here(self) -> bool:
        """Whether this thread is the one that completes the watched messages."""
        return self._thread is threading.current_thread()

    def drain(self, everyones: Sequence[InFlight]) -> None:
        """Wait for everything that was sent and never waited for; cancel receives without a message.

        Args:
            everyones: by group rank, what is in flight there; nothing is going to be added.

        Raises:
            CollectiveMismatch: something was sent that nobody receives.
        """
        left = list(self._in_flight)
        for work in left:
            answered = work.is_answered(everyones)
            if work.is_receive and answered:
                Backoff(UNRECEIVED_S, quiet=True).wait_for(work.is_through)
            elif not work.is_receive and not answered:
                self._wait_a_little(work)
        for work in left:
            if work.is_receive:
                work.cancel()
            else:
                work.wait()
        if self._thread is not None:
            # A thread that lets go of a tensor while Python ends would abort the process.
            self._thread.join_from_others(self.timeout_s)

    def _wait_a_little(self, work: MessageWork) -> None:
        """Wait for a message that the other side has received, or never will."""
        if not Backoff(UNRECEIVED_S, quiet=True).wait_for(work.is_through):
            raise CollectiveMismatch(
                f"{work.name} (group '{self.group[0]}', tag {work.message.tag}): both ranks are at the end "
                "of their programs, and nobody has received it"
            )

    def abandon(self, error: MpisgdError) -> None:
        """Fail whatever is in flight with such an error; nobody waits for it."""
        for work in list(self._in_flight):
            work.fail(type(error)(f"{work.name}: {error}"))
        if self._thread is not None:
            self._thread.join_from_others(self.timeout_s)

    def abandon_devices(self, error: MpisgdError) -> None:
        """End what is in flight on a device, which raises `error` from now on. From any thread."""
        if self.elsewhere is not None:
            self.elsewhere.abandon(error)

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self.elsewhere is not None:
            self.elsewhere.close()
        self.communicator.free()


def _with_room(memory: Tensor, arrived: Callable[[int], None]) -> tuple[Tensor, Callable[[int], None]]:
    """Return memory in which an announcement has room as well, and what then follows."""
    room = torch.empty(ANNOUNCEMENT_BYTES, dtype=torch.uint8)

    def call(nbytes: int) -> None:
        if 0 < nbytes <= memory.nbytes:
            memory.view(torch.uint8)[:nbytes] = room[:nbytes]
        arrived(nbytes)

    return room, call
