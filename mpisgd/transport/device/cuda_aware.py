"""Does this MPI take addresses on a GPU? Asked of the library itself, since its version does not tell."""

import ctypes
import re
from pathlib import Path

__all__ = ["is_cuda_aware", "libmpi"]


def libmpi() -> str | None:
    """Return the file of the MPI library in use, which need not be the one that was expected."""
    # psutil would read smaps, for which the kernel walks all of the process's pages.
    try:
        found = re.search(r"/\S*/libmpi(?:ch)?\.so\S*", Path("/proc/self/maps").read_text())
    except OSError:
        return None
    return found[0] if found else None


def is_cuda_aware() -> bool:
    """Return whether the MPI library says so itself: Open MPI and MPICH have a function for the question.

    A library without it counts as one that does not: to hand it an address on a GPU would be a crash.
    """
    library = libmpi()
    if library is None:
        return False
    try:
        return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False
