"""Builds and loads guard.cpp: what torch's C++ asks of a device."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["has_compiler", "load", "register"]

SOURCE = Path(__file__).with_name("guard.cpp")
HANDLE, INT, ID = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
CALLS = {  # in the order of `Calls` in guard.cpp: what it returns, and its arguments
    "new_stream": (ID, INT),
    "record": (HANDLE, HANDLE, INT, ID),
    "block": (None, HANDLE, INT, ID),
    "query_event": (INT, HANDLE),
    "destroy_event": (None, HANDLE),
    "synchronize_event": (None, HANDLE),
    "query_stream": (INT, INT, ID),
    "synchronize_stream": (None, INT, ID),
    "synchronize_device": (None, INT),
    "record_memory": (None, HANDLE, INT, ID),
    "allocate": (HANDLE, ID, INT),
    "free": (None, HANDLE),
}


def has_compiler() -> bool:
    """Return whether the device can be built here."""
    return _compiler() is not None


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def load() -> Any:
    """Return the library, built once for this torch and kept in the folder for temporary files."""
    text = SOURCE.read_bytes() + torch.__version__.encode()
    name = f"mpisgd-simulated-gpu-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        _build(library)
    return ctypes.CDLL(str(library))


def _build(library: Path) -> None:
    compiler = _compiler()
    assert compiler is not None, "a simulated GPU needs a C++ compiler: install g++ or clang++, or set CXX"
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "guard.so"  # other ranks may build it at the same time
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(
            [compiler, *options[:4], options[4], str(SOURCE), "-o", str(built), *options[5:]], check=True
        )
        built.replace(library)


def register(num_devices: int, functions: dict[str, Callable[..., Any]]) -> Any:
    """Make the device known to torch, and return the library.

    Args:
        num_devices: how many there are.
        functions: one for each of `CALLS`; none may raise.
    """
    types = {name: ctypes.CFUNCTYPE(*of_call) for name, of_call in CALLS.items()}
    calls_type = type("Calls", (ctypes.Structure,), {"_fields_": list(types.items())})
    library = load()
    library.calls = calls_type(*(types[name](functions[name]) for name in CALLS))  # alive as long as it is
    library.get_stream.restype = ID
    library.get_stream.argtypes = [INT]
    library.set_stream.argtypes = [INT, ID]
    library.register_guard(num_devices, ctypes.byref(library.calls))
    return library
