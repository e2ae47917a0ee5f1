"""Freed memory is kept: a training step takes again what the step before it has freed.

By default glibc maps every tensor of 32 MiB or more anew and unmaps it when it is freed, so the kernel clears
all of its pages in every step: for large layers that takes longer than the communication. `mallopt` changes
this from inside the process, for all threads and for what is allocated from then on.
"""

import ctypes
import os
from collections.abc import Mapping

__all__ = [
    "MALLOC_VARIABLES",
    "describe",
    "keep_freed_memory",
    "return_freed_memory",
    "return_large_memory",
]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}  # nothing is mapped by itself; the heap never shrinks
GLIBC_DEFAULTS = {M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: 128 * 2**10}
MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
RETURN_LARGE = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 2**17, M_TRIM_THRESHOLD: 2**17}
KEPT, RETURNED = "kept until shutdown()", "not kept: parameters are in files"

_state = "not kept: init() was not called"


def keep_freed_memory(wanted: bool) -> None:
    """Let glibc keep freed memory, unless the user has set what it does or this is another C library."""
    global _state
    if not wanted:
        _state = "not kept: switched off"
    elif chosen := _settings_of_user():
        _state = f"as {chosen} says"
    elif not _mallopt(KEEP):
        _state = "not kept: the C library is not glibc"
    else:
        _state = KEPT


def return_large_memory() -> None:
    """Let glibc return large memory as soon as it is freed, unless the user has set what it does.

    For models that are larger than memory. What is kept would be of no use to layers of other sizes: small
    objects come to lie in it, and the heap grows with every layer.
    """
    global _state
    if not _settings_of_user() and _mallopt(RETURN_LARGE):
        _state = RETURNED


def return_freed_memory() -> None:
    """Return to the system what is free, and let glibc do as it does by default."""
    global _state
    if _state == KEPT:
        _mallopt(GLIBC_DEFAULTS)
        ctypes.CDLL(None).malloc_trim(0)
        _state = "not kept: shutdown() was called"


def describe() -> str:
    """Describe whether this process keeps freed memory."""
    return _state


def _settings_of_user() -> str:
    """Return the variable by which the user has set up glibc's allocator, or ""."""
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES"
    return next((name for name in MALLOC_VARIABLES if name in os.environ), "")


def _mallopt(settings: Mapping[int, int]) -> bool:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in settings.items())
