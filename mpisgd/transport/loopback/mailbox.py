"""`Mailbox`: what has arrived for one rank in one communicator, and what it receives there.

A message goes to the receive that was posted first among those that it fits, a receive takes what has arrived
first, as MPI says. Nothing is given to a receive before its rank calls MPI (`match`).
"""

import ctypes
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mpisgd.errors import ShapeMismatch

__all__ = ["Mailbox", "Message", "MessageMemory", "Request"]


class MessageMemory(NamedTuple):
    """Some bytes that a request reads or writes; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: object

    @classmethod
    def of(cls, given: Tensor | bytearray) -> "MessageMemory":
        """Return the memory of a contiguous tensor or of a bytearray."""
        if isinstance(given, Tensor):
            return cls(given.data_ptr(), given.nbytes, given)
        array = (ctypes.c_char * len(given)).from_buffer(given)
        return cls(ctypes.addressof(array), len(given), array)

    def copy(self) -> "MessageMemory":
        """Return a copy."""
        return MessageMemory.of(bytearray(ctypes.string_at(self.address, self.nbytes)))

    def fill_from(self, other: "MessageMemory") -> None:
        """Copy another one's bytes to the beginning of this."""
        ctypes.memmove(self.address, other.address, other.nbytes)


class Request:
    """Something that was started; it is over when `is_done`.

    Attributes:
        source: the rank that a message has come from.
        nbytes: that were received.
        error: what went wrong.
    """

    def __init__(self, test: Callable[[], bool] | None = None) -> None:
        self.is_done = False
        self.source = 0
        self.nbytes = 0
        self.error: Exception | None = None
        self._test = test

    def test(self) -> bool:
        """Return whether it is over, moving it along.

        Raises:
            ShapeMismatch: the message is longer than the memory.
        """
        if not self.is_done and self._test is not None:
            self.is_done = self._test()
        if self.error is not None:
            raise self.error
        return self.is_done


class Message(NamedTuple):
    """A message on its way, or arrived.

    Attributes:
        src: group rank.
        tag: as sent.
        memory: the bytes; the sender's own where `request` is not over.
        request: of the sender.
    """

    src: int
    tag: int
    memory: MessageMemory
    request: Request


class _Receive(NamedTuple):
    number: int  # in the order in which they were posted
    src: int | None
    tag: int
    memory: MessageMemory
    request: Request


class Mailbox:
    """See the module.

    Args:
        is_readable: tells whether the memory of a message may still be read.
    """

    def __init__(self, is_readable: Callable[[Message], bool]) -> None:
        self._is_readable = is_readable
        self._arrived: deque[Message] = deque()  # of which the rank does not know yet
        self._unexpected: defaultdict[int, dict[int, Message]] = defaultdict(dict)  # by tag, then number
        self._receives: defaultdict[tuple[int | None, int], dict[int, _Receive]] = defaultdict(dict)
        self._numbers = itertools.count()

    def arrive(self, message: Message) -> None:
        """Put a message in; those of one sender come in the order in which they were sent."""
        self._arrived.append(message)

    def match(self) -> list[Message]:
        """Give what has arrived to the receives that wait for it; return what was received."""
        received = []
        while self._arrived:
            message = self._arrived.popleft()
            if not self._is_readable(message):
                continue
            if (receive := self._receive_for(message)) is None:
                self._unexpected[message.tag][next(self._numbers)] = message
            else:
                _deliver(message, receive)
                received.append(message)
        return received

    def _receive_for(self, message: Message) -> _Receive | None:
        """Take the receive that was posted first among those that a message fits."""
        keys = ((message.src, message.tag), (None, message.tag))
        heads = [next(iter(posted.values())) for key in keys if (posted := self._receives.get(key))]
        if not heads:
            return None
        first = min(heads)
        del self._receives[first.src, first.tag][first.number]
        return first

    def post(self, src: int | None, tag: int, memory: MessageMemory, request: Request) -> Message | None:
        """Begin to receive; return the message where it has come already."""
        receive = _Receive(next(self._numbers), src, tag, memory, request)
        unexpected = self._unexpected[tag]
        for number, message in list(unexpected.items()) if unexpected else ():
            if src in (None, message.src):
                del unexpected[number]
                if not self._is_readable(message):
                    continue
                _deliver(message, receive)
                return message
        self._receives[src, tag][receive.number] = receive
        return None

    def cancel(self, request: Request) -> None:
        """Receive nothing by this request any more."""
        for posted in self._receives.values():
            for number, receive in posted.items():
                if receive.request is request:
                    del posted[number]
                    return

    def first_unexpected(self, tag: int | None) -> Message | None:
        """Return the oldest message that no receive was posted for; `tag` None: of any tag."""
        tags = list(self._unexpected) if tag is None else [tag]
        heads = [next(iter(self._unexpected[each].items())) for each in tags if self._unexpected.get(each)]
        return min(heads, key=lambda head: head[0])[1] if heads else None


def _deliver(message: Message, receive: _Receive) -> None:
    if message.memory.nbytes > receive.memory.nbytes:
        receive.request.error = ShapeMismatch(
            f"recv: the message from rank {message.src} ({message.memory.nbytes} bytes or more) is longer "
            "than the tensor"
        )
    else:
        receive.memory.fill_from(message.memory)
    receive.request.source, receive.request.nbytes = message.src, message.memory.nbytes
    receive.request.is_done = message.request.is_done = True
