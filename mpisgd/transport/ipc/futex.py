"""`Futex`: sleeping until another rank of this host changes a word of shared memory.

Where ranks share a core, a waiting one that polls again and again takes the time that the others need. The
kernel's futex lets it sleep on a word and be woken by whoever writes it. The C library has no function for
it, only the system call.
"""

import ctypes
import functools
import mmap
import platform
import sys
from typing import Any

__all__ = ["Futex"]

_FUTEX_BY_MACHINE = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}
FUTEX = _FUTEX_BY_MACHINE.get(platform.machine(), -1) if sys.platform == "linux" else -1
WAIT, WAKE, EVERYONE = 0, 1, 2**31 - 1
WORD_BYTES = 8


@functools.cache
def _system_calls() -> tuple[Any, Any]:
    """Return the system call that releases the interpreter's lock, and the one that keeps it."""
    return ctypes.CDLL(None).syscall, ctypes.PyDLL(None).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The 8-byte words of shared memory as something to sleep on.

    Args:
        memory: the words; whoever uses this keeps it.

    Attributes:
        available: whether this kernel and machine have it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.available = FUTEX >= 0
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._call, self._call_with_gil = (
            _system_calls()
        )  # the latter where another thread would take the lock

    def wake(self, word: int) -> None:
        """Wake whoever waits on word number `word`, which has been written."""
        self._call_with_gil(
            ctypes.c_long(FUTEX), self._address(word), WAKE, ctypes.c_uint32(EVERYONE), None, None, 0
        )

    def wait(self, word: int, value: int, limit_s: float) -> None:
        """Sleep until `wake`, or `limit_s` seconds; not at all if the word is no longer `value`."""
        limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        expected = ctypes.c_uint32(value & 0xFFFFFFFF)
        self._call(ctypes.c_long(FUTEX), self._address(word), WAIT, expected, ctypes.byref(limit), None, 0)

    def _address(self, word: int) -> ctypes.c_void_p:
        """Return the address of a word; the kernel compares its lower half, which comes first above."""
        return ctypes.c_void_p(self._start + word * WORD_BYTES)
