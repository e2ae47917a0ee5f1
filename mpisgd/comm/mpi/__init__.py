"""The one package that imports mpi4py: it starts MPI, and speaks to it in raw memory.

Importing it starts MPI, so it is imported by `init()` alone, after the defaults of `mpisgd.config` are in the
environment. All others get a `Wire` handed to them.
"""

from mpi4py import MPI

from mpisgd.comm.mpi.calls import OVERDUE, set_apart
from mpisgd.comm.mpi.datatypes import ELEMENT_TYPES
from mpisgd.comm.mpi.library import (
    library_version,
    parent,
    progress,
    start,
    survives_losses,
    thread_level,
)
from mpisgd.comm.mpi.wire import Wire, let_go, revoke_all

__all__ = [
    "ELEMENT_TYPES",
    "MPI",
    "OVERDUE",
    "Wire",
    "let_go",
    "library_version",
    "parent",
    "progress",
    "revoke_all",
    "set_apart",
    "start",
    "survives_losses",
    "thread_level",
]
