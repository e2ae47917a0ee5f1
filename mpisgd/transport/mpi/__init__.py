"""The one package that imports mpi4py: it starts MPI, and hands it raw memory.

Importing it starts MPI, so it is imported by `init()` alone, after the defaults of `mpisgd.config` are in the
environment. All others get a `Communicator` handed to them.
"""

from mpi4py import MPI

from mpisgd.transport.mpi.communicator import Communicator, as_mpi
from mpisgd.transport.mpi.datatypes import ELEMENT_TYPES
from mpisgd.transport.mpi.library import (
    MpiFaultTolerance,
    library_version,
    parent,
    progress,
    start,
    survives_losses,
    thread_level,
)
from mpisgd.transport.mpi.window import MpiWindow

__all__ = [
    "ELEMENT_TYPES",
    "MPI",
    "Communicator",
    "MpiFaultTolerance",
    "MpiWindow",
    "as_mpi",
    "library_version",
    "parent",
    "progress",
    "start",
    "survives_losses",
    "thread_level",
]
