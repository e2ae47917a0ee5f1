"""Does this MPI take addresses on a GPU? Asked of the library itself, since its version does not tell.

Open MPI 4 answers what it was compiled for, whatever it was started with. So an answer of yes is tried out
before anything depends on it; see cuda_aware_trial.py.
"""

import ctypes
import re
from pathlib import Path

import torch

__all__ = ["is_cuda_aware", "libmpi"]

# Open MPI's, MPICH's and Intel's, and those of Cray, which are named after compilers.
LIBRARY = re.compile(r"/\S*/libmpi(?:ch)?(?:_(?:cray|gnu|intel|nvidia|amd|aocc|pgi)\w*)?\.so\S*")
# MPICH's numbers of kinds of GPUs, for the function that Cray has, too.
CUDA, HIP = 0, 2


def libmpi() -> str | None:
    """Return the file of the MPI library in use, which need not be the one that was expected."""
    # psutil would read smaps, for which the kernel walks all of the process's pages.
    try:
        found = LIBRARY.search(Path("/proc/self/maps").read_text())
    except OSError:
        return None
    return found[0] if found else None


def is_cuda_aware() -> bool:
    """Return whether the MPI library says that it takes addresses on GPUs of torch's kind.

    Open MPI has a function for NVIDIA's and one for AMD's, MPICH and Cray's one for all. A library without
    any counts as one that does not: to hand it an address on a GPU would be a crash.
    """
    path = libmpi()
    if path is None:
        return False
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return False
    is_amd = torch.version.hip is not None
    if (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:
        supported = ctypes.c_int(0)
        return query(HIP if is_amd else CUDA, ctypes.byref(supported)) == 0 and bool(supported.value)
    name = "MPIX_Query_rocm_support" if is_amd else "MPIX_Query_cuda_support"
    query = getattr(library, name, None)
    return query is not None and bool(query())
