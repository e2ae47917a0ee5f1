"""The resources of a process, which must not grow with the number of lost ranks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAMELESS = "/memfd:"  # shared memory of mpisgd
OF_MPI = "/dev/shm/"


def resources() -> dict[str, int]:
    """Count the mapped shared memory, open files and sockets of this process.

    Returns:
        `memory` and `memory_bytes`: of mpisgd's shared memory, files and bytes; `of_mpi`: files of MPI's;
        `files`: open ones of any kind; `sockets`.
    """
    mapped = list(_mapped())
    ours = {inode for name, inode, _ in mapped if name.startswith(NAMELESS)}
    opened = list(_opened())
    return {
        "memory": len(ours),
        "memory_bytes": sum(size for name, _, size in mapped if name.startswith(NAMELESS)),
        "of_mpi": len({inode for name, inode, _ in mapped if name.startswith(OF_MPI)}),
        "files": len(opened),
        "sockets": sum(target.startswith("socket:") for target in opened),
    }


def _mapped() -> Iterator[tuple[str, str, int]]:
    """The name, inode and size of all mapped files."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        if name:
            start, end = (int(address, 16) for address in span.split("-"))
            yield name[0], inode, end - start


def _opened() -> Iterator[str]:
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(entry.path)
