"""The exceptions of mpisgd, one tree.

    MpisgdError
     +-- NotInitialized       RuntimeError     the job's world is needed and not to be had
     +-- AlreadyInitialized   RuntimeError     init() with another communicator
     +-- MpiNotFound          ImportError      no MPI library on this machine
     +-- MpiFailed            RuntimeError     the MPI library reported an error
     |    +-- PeerLost        ConnectionError  ... because a rank went away
     +-- InvalidRank          ValueError       a rank that the group does not have
     +-- NotInGroup           ValueError       this rank is not a member of the group
     +-- UnsupportedTensor    TypeError        a layout, device or dtype that cannot travel
     +-- UnsupportedOp        TypeError        an operation the dtype does not have
     +-- ShapeMismatch        ValueError       sizes disagree on this rank, before anything was sent
     +-- InvalidArgument      ValueError       any other argument that makes no sense
     +-- CollectiveMismatch   RuntimeError     the ranks called different things; raised on every rank
     +-- CollectiveTimeout    TimeoutError     waited longer than the time limit for other ranks
     +-- JobError             RuntimeError     a program's own "this cannot work", without a traceback

Every leaf also is the builtin it means, so `except ValueError` catches what one expects.
"""

__all__ = [
    "AlreadyInitialized",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "InvalidArgument",
    "InvalidRank",
    "JobError",
    "MpiFailed",
    "MpiNotFound",
    "MpisgdError",
    "NotInGroup",
    "NotInitialized",
    "PeerLost",
    "ShapeMismatch",
    "UnsupportedOp",
    "UnsupportedTensor",
]


class MpisgdError(Exception):
    """Base of everything mpisgd raises on purpose.

    `on_every_rank` is True where all ranks of the group raise the same error at the same operation; then
    one of them speaks for all.
    """

    on_every_rank = False


class NotInitialized(MpisgdError, RuntimeError):
    """The job's world is needed and not there."""


class AlreadyInitialized(MpisgdError, RuntimeError):
    """`init()` was called again with something else."""


class MpiNotFound(MpisgdError, ImportError):
    """mpi4py is there but finds no MPI library."""


class MpiFailed(MpisgdError, RuntimeError):
    """The MPI library reported an error."""


class PeerLost(MpiFailed, ConnectionError):
    """A rank went away in the middle of an operation."""


class InvalidRank(MpisgdError, ValueError):
    """A rank outside the group."""


class NotInGroup(MpisgdError, ValueError):
    """This rank used a group it is not a member of."""


class UnsupportedTensor(MpisgdError, TypeError):
    """A tensor that cannot travel: sparse, on another device, an unknown dtype."""


class UnsupportedOp(MpisgdError, TypeError):
    """A reduction that the dtype does not have, such as AVG of integers."""


class ShapeMismatch(MpisgdError, ValueError):
    """Sizes disagree on this rank; nothing was sent."""


class InvalidArgument(MpisgdError, ValueError):
    """An argument that makes no sense; nothing was sent."""


class CollectiveMismatch(MpisgdError, RuntimeError):
    """Ranks of a group called different operations; every one of them raises this, nothing was sent."""

    on_every_rank = True


class CollectiveTimeout(MpisgdError, TimeoutError):
    """Other ranks did not come within the time limit; the group cannot be used any more."""


class JobError(MpisgdError, RuntimeError):
    """What a program raises when its user must change something: a file, an option, the number of ranks.

    Uncaught, its text is printed as one line, once for the whole job, and the job ends with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
