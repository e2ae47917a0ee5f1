"""Another process's memory is read and written where it lies; what cannot be reached is said."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpisgd.errors import MpisgdError
from mpisgd.transport.cma import cross_memory_attach as module
from mpisgd.transport.cma.cross_memory_attach import CrossMemoryAttach

OTHER = """
import ctypes
text = ctypes.create_string_buffer(b"0123456789")
print(ctypes.addressof(text), flush=True)
input()
print(text.value.decode())
"""


@pytest.fixture
def other():
    """Another process, and the address of ten bytes in it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OTHER], text=True, **pipes) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def memory_of(process: subprocess.Popen[str]) -> CrossMemoryAttach:
    memory = CrossMemoryAttach([os.getpid(), process.pid], [4, 7])
    probe = ctypes.create_string_buffer(1)
    try:
        memory.read(0, ctypes.addressof(probe), ctypes.addressof(probe), 1)
    except MpisgdError:
        pytest.skip("this machine does not let processes reach each other")
    return memory


def test_bytes_come_and_go(other):
    process, address = other
    memory, here = memory_of(process), ctypes.create_string_buffer(b"......abc")
    memory.read(1, ctypes.addressof(here) + 1, address + 3, 4)
    assert here.value == b".3456.abc"
    memory.write(1, address + 5, ctypes.addressof(here) + 6, 3)
    memory.read(1, ctypes.addressof(here), address, 0)
    assert process.communicate("\n")[0] == "01234abc89\n"


def test_what_cannot_be_reached_is_said_with_the_rank(other):
    process, _ = other
    here = ctypes.create_string_buffer(8)
    with pytest.raises(MpisgdError, match="memory of rank 7: Bad address"):
        memory_of(process).read(1, ctypes.addressof(here), 8, 8)


@pytest.mark.parametrize("stale", [errno.ESRCH, 0])
def test_a_copy_that_ends_early_is_said_whatever_errno_was_before(other, stale):
    """Only a call that fails sets errno; an old ESRCH looked as if the process were gone."""
    process, address = other
    memory, here = memory_of(process), ctypes.create_string_buffer(2**28)
    ctypes.set_errno(stale)
    with pytest.raises(MpisgdError, match=r"memory of rank 7: only \d+ of 268435456 bytes were copied"):
        memory.read(1, ctypes.addressof(here), address, 2**28)


def test_a_process_that_is_gone_is_left_to_those_who_wait_for_it(other):
    process, address = other
    memory, here = memory_of(process), ctypes.create_string_buffer(b"as before")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but it still has its number
    memory.read(1, ctypes.addressof(here), address, 4)
    process.wait()
    memory.read(1, ctypes.addressof(here), address, 4)
    assert here.value == b"as before"


def test_memory_that_the_kernel_does_not_copy_to_is_known(other):
    memory, text = memory_of(other[0]), ctypes.create_string_buffer(b"unchanged")
    assert memory.is_mine(ctypes.addressof(text), len(text))
    assert text.value == b"unchanged"
    assert not memory.is_mine(ctypes.addressof(text), 0)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    hole = ctypes.addressof(ctypes.c_char.from_buffer(page))
    assert memory.is_mine(hole, mmap.PAGESIZE)
    libc = ctypes.CDLL(None)
    libc.mprotect(ctypes.c_void_p(hole), ctypes.c_size_t(mmap.PAGESIZE), 1)  # to be read only
    assert not memory.is_mine(hole, mmap.PAGESIZE)


@pytest.mark.parametrize(("scope", "asked"), [("0\n", False), ("1\n", True), ("2\n", False), (None, False)])
def test_where_yama_asks_for_it_what_the_launcher_has_started_may_come_in(
    scope, asked, monkeypatch, tmp_path
):
    calls = []
    monkeypatch.setattr(module, "YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(module, "_libc", SimpleNamespace(prctl=lambda *args: calls.append(args)))
    if scope is not None:
        module.YAMA.write_text(scope)
    module._let_siblings_in()
    assert [(what, pid.value) for what, pid, *_ in calls] == [(0x59616D61, os.getppid())] * asked
