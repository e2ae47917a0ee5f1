"""Whether glibc keeps what is freed: asked of the allocator itself, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from mpisgd.job.malloc_settings import KEPT, MALLOC_VARIABLES

PROGRAM = """
    import ctypes, os
    import numpy, psutil
    from mpisgd.job.malloc_settings import describe, keep_freed_memory, return_freed_memory

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split())]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2

    def mapped():
        before = libc.mallinfo2().hblks
        array = numpy.ones(16 * 2**20, numpy.float32)  # 64 MiB
        return libc.mallinfo2().hblks - before

    def resident():
        return psutil.Process().memory_info().rss

    keep_freed_memory(wanted={wanted})
    print(describe())
    print(mapped())
    held = resident()
    return_freed_memory()
    print(held - resident() > 2**25, mapped())
"""


def run(wanted: bool = True, **env: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    program = textwrap.dedent(PROGRAM.format(wanted=wanted))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.splitlines()


def test_what_is_freed_is_kept_until_it_is_returned():
    assert run() == [KEPT, "0", "True 1"]


def test_switched_off_nothing_changes():
    state, mapped, after = run(wanted=False)
    assert "switched off" in state
    assert (mapped, after) == ("1", "False 1")


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")],
)
def test_settings_of_the_user_win(name, value):
    state, mapped, _ = run(**{name: value})
    assert state == f"as {name} says"
    assert mapped == "1"
