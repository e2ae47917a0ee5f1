"""Socket filters: from which addresses a listening socket receives anything, and whether it receives data.

torch's TensorPipe takes whoever can connect for a rank, so strangers must not get that far. A socket filter
needs no privilege, acts before the connection is made, and is inherited by the connections themselves.
"""

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = ["admit_data", "admit_only", "reject_pending"]

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # Linux
NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: from the header of IP on; without it: from that of TCP on
SOURCE = {4: (12,), 6: (8, 12, 16, 20)}  # where the words of the sender's address are in IP's header
TCP_HEADER_WORDS = 12  # the byte of TCP's header whose upper half is the header's length in words
LOAD_WORD, LOAD_BYTE, LOAD_LENGTH, JUMP_IF_EQUAL, RETURN = 0x20, 0x30, 0x80, 0x15, 0x06
AND, SHIFT_RIGHT, MOVE_TO_X, JUMP_IF_X = 0x54, 0x74, 0x07, 0x1D
KEEP, DROP = 0xFFFFFFFF, 0
MAX_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]  # what, how many to skip if true, if false, operand

# Drop a packet that is longer than its TCP header. What goes on has opened, acknowledged or closed something.
NO_DATA: Sequence[Instruction] = (
    (LOAD_BYTE, 0, 0, TCP_HEADER_WORDS),
    (AND, 0, 0, 0xF0),
    (SHIFT_RIGHT, 0, 0, 2),  # the upper half of the byte, times four
    (MOVE_TO_X, 0, 0, 0),
    (LOAD_LENGTH, 0, 0, 0),
    (JUMP_IF_X, 1, 0, 0),
    (RETURN, 0, 0, DROP),
)


def admit_only(listener: socket.socket, addresses: Iterable[str], *, data: bool = True) -> None:
    """Let `listener` receive from `addresses` alone from now on, and reject what is in its queue.

    Args:
        listener: an IPv4 or IPv6 socket that listens.
        addresses: of the kind of the socket's own.
        data: False to let them connect and nothing more: what they send is dropped, and TCP sends it again
            until the connection's own filter is gone (`admit_data`).

    Raises:
        OSError: the kernel does not take the filter, or there are more than some hundred addresses.
    """
    program = _filter(sorted({ip_address(address) for address in addresses}, key=int), data=data)
    if len(program) > MAX_INSTRUCTIONS:
        raise OSError("too many addresses for a socket filter")
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code, len(code))
    where = struct.pack("HP", len(program), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, where)
    reject_pending(listener)


def admit_data(connection: socket.socket) -> None:
    """Take away the filter that a connection has inherited.

    Raises:
        OSError: it is closed.
    """
    with contextlib.suppress(FileNotFoundError):  # it has none
        connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def reject_pending(listener: socket.socket) -> None:
    """Close the connections that wait to be accepted."""
    timeout = listener.gettimeout()
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
    listener.settimeout(timeout)


def _filter(addresses: Iterable[IPv4Address | IPv6Address], *, data: bool) -> list[Instruction]:
    """Return the program: compare the sender with each address in turn."""
    program: list[Instruction] = [] if data else [*NO_DATA]
    for address in addresses:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        for left, (offset, word) in enumerate(zip(SOURCE[address.version], words, strict=True)):
            to_the_next = 2 * (len(words) - left - 1) + 1
            program += [(LOAD_WORD, 0, 0, NETWORK_HEADER + offset), (JUMP_IF_EQUAL, 0, to_the_next, word)]
        program.append((RETURN, 0, 0, KEEP))
    return [*program, (RETURN, 0, 0, DROP)]
