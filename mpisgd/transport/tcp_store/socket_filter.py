"""A socket filter that admits certain addresses only: the kernel drops packets from any other.

torch's store takes whoever can connect for a rank, so strangers must not get that far. A socket filter
needs no privilege, acts before the connection is made, and is inherited by the connections themselves.
"""

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = ["admit_only", "reject_pending"]

SO_ATTACH_FILTER = 26  # Linux
NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: from the header of IP on
SOURCE = {4: (12,), 6: (8, 12, 16, 20)}  # where the words of the sender's address are in it
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
KEEP, DROP = 0xFFFFFFFF, 0
MAX_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]  # what, how many to skip if true, if false, operand


def admit_only(listener: socket.socket, addresses: Iterable[str]) -> None:
    """Let `listener` receive from `addresses` alone from now on, and reject what is in its queue.

    Args:
        listener: an IPv4 or IPv6 socket that listens.
        addresses: of the kind of the socket's own.

    Raises:
        OSError: the kernel does not take the filter, or there are more than some hundred addresses.
    """
    program = _filter(sorted({ip_address(address) for address in addresses}, key=int))
    if len(program) > MAX_INSTRUCTIONS:
        raise OSError("too many addresses for a socket filter")
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code, len(code))
    where = struct.pack("HP", len(program), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, where)
    reject_pending(listener)


def reject_pending(listener: socket.socket) -> None:
    """Close the connections that wait to be accepted."""
    timeout = listener.gettimeout()
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
    listener.settimeout(timeout)


def _filter(addresses: Iterable[IPv4Address | IPv6Address]) -> list[Instruction]:
    """Return the program: compare the sender with each address in turn."""
    program: list[Instruction] = []
    for address in addresses:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        for left, (offset, word) in enumerate(zip(SOURCE[address.version], words, strict=True)):
            to_the_next = 2 * (len(words) - left - 1) + 1
            program += [(LOAD_WORD, 0, 0, NETWORK_HEADER + offset), (JUMP_IF_EQUAL, 0, to_the_next, word)]
        program.append((RETURN, 0, 0, KEEP))
    return [*program, (RETURN, 0, 0, DROP)]
