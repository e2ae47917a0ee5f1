"""A file without a name that the processes of one host share.

The first rank makes a memfd and the others open it through that rank's /proc entry. It needs no room in
/dev/shm (64 MiB in a plain container), nobody else can open it, and the kernel frees it when the last of
them has gone, whatever way it went.
"""

import fcntl
import os

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.threads.fault_points import ALLOCATE, may_fail

__all__ = ["NAME", "create", "open_shared"]

MODE = 0o600
NAME = "mpisgd"  # what /proc calls them


def open_shared(local: GroupCommunicator, nbytes: int, name: str = NAME) -> int:
    """Return a descriptor of one file of `nbytes` for all ranks, -1 where this rank cannot have it.

    Collective. The first rank must keep its descriptor until all others have answered: let the ranks
    compare what they got before anyone closes his.
    """
    fd = create(nbytes, name) if local.rank == 0 else -1
    address = (f"/proc/{os.getpid()}/fd/{fd}", _identity(fd)) if fd >= 0 else ("", (0, 0))
    path, identity = local.broadcast_object(address, 0)
    return fd if local.rank == 0 else _open(path, identity)


def create(nbytes: int, name: str = NAME) -> int:
    """Return a new memfd of `nbytes`, -1 where there is no such thing; nobody can shrink it."""
    try:
        may_fail(ALLOCATE)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return -1
    try:
        os.fchmod(fd, MODE)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        return -1
    return fd


def _identity(fd: int) -> tuple[int, int]:
    """Return the device and inode of a file, which no other file has."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _open(path: str, identity: tuple[int, int]) -> int:
    """Open the first rank's memfd, -1 where that fails: another container, or other process ids."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return -1
    if _identity(fd) == identity:
        return fd
    os.close(fd)
    return -1
