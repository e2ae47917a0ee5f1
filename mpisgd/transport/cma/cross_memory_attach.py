"""`CrossMemoryAttach`: the kernel copies from and to the memory of the other ranks of a host.

Linux calls it cross memory attach. It takes one copy where staging memory takes two, and nobody need wait for
anybody in between. The kernel asks of both processes what it asks of a debugger: the same user, and Yama's
consent where that is switched on.
"""

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mpisgd import config
from mpisgd.errors import MpisgdError
from mpisgd.interfaces.communicator import GroupCommunicator

__all__ = ["CrossMemoryAttach", "open_cross_memory_attach"]

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
DESCENDANTS_ONLY = "1"
PR_SET_PTRACER = 0x59616D61
WORD_BYTES = 8


class _IoVec(ctypes.Structure):
    """The kernel's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def _not_available(*_: Any) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _kernel_call(name: str) -> Any:
    """Return one of the two calls, or one that always fails where the C library has none."""
    call = getattr(_libc, name, None)
    if call is None:
        return _not_available
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    return call


_read, _write = _kernel_call("process_vm_readv"), _kernel_call("process_vm_writev")


class CrossMemoryAttach:
    """The memory of some processes; for one thread at a time.

    Args:
        pids: of the processes, by local rank.
        names: how messages call them, by local rank.
        huge_pages: see below.

    Attributes:
        huge_pages: whether large tensors lie in huge pages on all of them: the kernel finds these faster.
    """

    def __init__(self, pids: Sequence[int], names: Sequence[int], *, huge_pages: bool = False) -> None:
        self.huge_pages = huge_pages
        self._pids = pids
        self._names = names
        self._here, self._there = _IoVec(), _IoVec()
        self._at_here, self._at_there = ctypes.addressof(self._here), ctypes.addressof(self._there)
        self._pid = os.getpid()
        self._ends = (_IoVec * 2)(_IoVec(0, 1), _IoVec(0, 1))
        self._at_ends = ctypes.addressof(self._ends)

    def read(self, rank: int, to: int, source: int, nbytes: int) -> None:
        """Copy what lies at the address `source` of a local rank to the address `to` of this one.

        Raises:
            MpisgdError: the kernel refused; not if that process is gone, which others find out.
        """
        self._copy(_read, rank, to, source, nbytes)

    def write(self, rank: int, to: int, source: int, nbytes: int) -> None:
        """Copy what lies at the address `source` of this rank to the address `to` of another; as `read`."""
        self._copy(_write, rank, source, to, nbytes)

    def _copy(self, call: Any, rank: int, own: int, others: int, nbytes: int) -> None:
        here, there = self._here, self._there
        here.address, there.address = own, others
        here.nbytes = there.nbytes = nbytes
        copied = call(self._pids[rank], self._at_here, 1, self._at_there, 1, 0)
        if copied != nbytes:
            self._raise(rank, copied, nbytes)

    def _raise(self, rank: int, copied: int, nbytes: int) -> None:
        """Raise unless the process is gone; only a call that failed, not a short copy, sets errno."""
        code = ctypes.get_errno() if copied < 0 else 0
        if code == errno.ESRCH or _is_gone(self._pids[rank]):
            return
        why = os.strerror(code) if copied < 0 else f"only {copied} of {nbytes} bytes were copied"
        raise MpisgdError(f"cannot reach the memory of rank {self._names[rank]}: {why}")

    def is_mine(self, address: int, nbytes: int) -> bool:
        """Return whether the kernel can copy from and to this memory of our own, judging by both its ends.

        It cannot where a device's memory is mapped.
        """
        first, last = self._ends
        first.address, last.address = address, address + nbytes - 1
        return nbytes > 0 and _write(self._pid, self._at_ends, 2, self._at_ends, 2, 0) == 2  # what lies there


def open_cross_memory_attach(local: GroupCommunicator) -> CrossMemoryAttach | None:
    """Return the memory of the ranks of a host, None on all where one cannot reach another. Collective.

    Args:
        local: the communicator of this host's ranks.
    """
    wanted = config.cross_memory()
    if wanted:
        _let_siblings_in()
    secret = ctypes.create_string_buffer(secrets.token_bytes(WORD_BYTES), WORD_BYTES)
    place = ctypes.addressof(secret), secret.raw
    entries = local.all_gather_object((wanted, config.huge_pages(), os.getpid(), place))
    all_want, all_huge, pids, places = zip(*entries, strict=True)
    memory = CrossMemoryAttach(pids, local.global_ranks, huge_pages=all(all_huge))
    reached = all(all_want) and all(_shows(memory, rank, *there) for rank, there in enumerate(places))
    # All have read by the time that all have answered; the secrets are kept until then.
    return memory if all(local.all_gather_object(reached)) else None


def _shows(memory: CrossMemoryAttach, rank: int, address: int, wanted: bytes) -> bool:
    """Return whether a rank's secret lies where it says: else its number is another process's here."""
    found = ctypes.create_string_buffer(WORD_BYTES)
    with contextlib.suppress(MpisgdError):
        memory.read(rank, ctypes.addressof(found), address, WORD_BYTES)
    return found.raw == wanted


def _let_siblings_in() -> None:
    """Let what the launcher of this process has started reach this process, where Yama asks for that."""
    with contextlib.suppress(OSError):
        if YAMA.read_text().strip() == DESCENDANTS_ONLY:
            _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def _is_gone(pid: int) -> bool:
    """Return whether there is no such process any more, or only its number."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return True
