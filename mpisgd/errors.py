"""The exceptions of mpisgd, one tree.

    MpisgdError
     +-- NotInitialized       RuntimeError     the job's world group does not exist
     +-- AlreadyInitialized   RuntimeError     init() with another communicator
     +-- MpiNotFound          ImportError      no MPI library on this machine
     +-- MpiFailed            RuntimeError     the MPI library reported an error
     |    +-- PeerLost        ConnectionError  ... because a rank went away
     +-- StateLost            RuntimeError     elastic: a rank and its replica are both lost
     +-- Unreachable          ConnectionError  no TCP between the hosts; RuntimeError too
     +-- NcclFailed           RuntimeError     NCCL reported an error
     +-- InvalidRank          ValueError       a rank that the group does not have
     +-- NotInGroup           ValueError       this rank is not a member of the group
     +-- UnsupportedTensor    TypeError        a layout, device or dtype that cannot be sent
     +-- UnsupportedOp        TypeError        an operation the dtype does not have
     +-- UnsupportedTorch     RuntimeError     this version of torch lacks what is asked for
     +-- ShapeMismatch        ValueError       sizes disagree on this rank, before anything was sent
     +-- InvalidArgument      ValueError       any other invalid argument
     +-- CollectiveMismatch   RuntimeError     the ranks called different operations; raised on every rank
     |    +-- Deadlock                          ... or wait for each other for ever
     +-- CollectiveTimeout    TimeoutError     waited longer than the timeout; RuntimeError too
     +-- OutOfSync            RuntimeError     the ranks hold different parameters; raised on every rank
     +-- NonFiniteGradients   ArithmeticError  a gradient is infinite or NaN; raised on every rank
     +-- PipelineFailed       RuntimeError     another rank of a pipeline has raised
     +-- CheckpointError      RuntimeError     not written, or not found; raised on every rank
     |    +-- CheckpointDamaged    RuntimeError     ... a damaged file
     |    +-- CheckpointMismatch   ValueError       ... its content does not fit the objects
     +-- OffloadError         OSError          a file of offloaded state fails; raised on every rank
     +-- JobError             RuntimeError     an error of the user's input, printed without a traceback

Every leaf also derives from the builtin exception named beside it, so `except ValueError` works.
"""

__all__ = [
    "AlreadyInitialized",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Deadlock",
    "InvalidArgument",
    "InvalidRank",
    "JobError",
    "MpiFailed",
    "MpiNotFound",
    "MpisgdError",
    "NcclFailed",
    "NonFiniteGradients",
    "NotInGroup",
    "NotInitialized",
    "OffloadError",
    "OutOfSync",
    "PeerLost",
    "PipelineFailed",
    "ShapeMismatch",
    "StateLost",
    "Unreachable",
    "UnsupportedOp",
    "UnsupportedTensor",
    "UnsupportedTorch",
]


class MpisgdError(Exception):
    """Base of everything mpisgd raises on purpose.

    `on_every_rank` is True if all ranks of the group raise the same error at the same operation; then one of
    them prints it.
    """

    on_every_rank = False


class NotInitialized(MpisgdError, RuntimeError):
    """The job's world group does not exist."""


class AlreadyInitialized(MpisgdError, RuntimeError):
    """`init()` was called again with another communicator."""


class MpiNotFound(MpisgdError, ImportError):
    """mpi4py finds no MPI library."""


class MpiFailed(MpisgdError, RuntimeError):
    """The MPI library reported an error."""


class PeerLost(MpiFailed, ConnectionError):
    """A rank went away in the middle of an operation."""


class StateLost(MpisgdError, RuntimeError):
    """A rank of an elastic job and the rank with its replica were both lost; raised on every rank."""

    on_every_rank = True


class Unreachable(MpisgdError, ConnectionError, RuntimeError):
    """The hosts of the job cannot connect by TCP; raised on every rank.

    A RuntimeError too, as is the error of torch's own stores.
    """

    on_every_rank = True


class NcclFailed(MpisgdError, RuntimeError):
    """NCCL, or torch around it, reported an error on tensors of a GPU."""


class InvalidRank(MpisgdError, ValueError):
    """A rank outside the group."""


class NotInGroup(MpisgdError, ValueError):
    """This rank used a group it is not a member of."""


class UnsupportedTensor(MpisgdError, TypeError):
    """A tensor that cannot be sent: sparse, on another device, of an unknown dtype."""


class UnsupportedOp(MpisgdError, TypeError):
    """A reduction that the dtype does not have, such as MAX of complex numbers."""


class UnsupportedTorch(MpisgdError, RuntimeError):
    """This version of torch lacks what is asked for."""


class ShapeMismatch(MpisgdError, ValueError):
    """Sizes disagree on this rank; nothing was sent."""


class InvalidArgument(MpisgdError, ValueError):
    """An invalid argument; nothing was sent."""


class CollectiveMismatch(MpisgdError, RuntimeError):
    """Ranks of a group called different operations; raised on every rank, nothing was sent."""

    on_every_rank = True


class Deadlock(CollectiveMismatch):
    """Ranks wait for each other in a cycle, or for a rank that has left.

    Raised on all of them within seconds; the groups in which they waited cannot be used any more.
    """


class CollectiveTimeout(MpisgdError, TimeoutError, RuntimeError):
    """Other ranks did not come within the timeout; the group cannot be used any more.

    A RuntimeError too: that is what torch's own backends raise, and what programs for them catch.
    """


class OutOfSync(MpisgdError, RuntimeError):
    """The ranks hold different parameters; raised on every rank."""

    on_every_rank = True


class CheckpointError(MpisgdError, RuntimeError):
    """A checkpoint could not be written, or there is none to load; raised on every rank."""

    on_every_rank = True


class OffloadError(MpisgdError, OSError):
    """A file of offloaded state could not be made, written or read; raised on every rank.

    The training cannot go on: restart it from the last checkpoint.
    """

    on_every_rank = True


class NonFiniteGradients(MpisgdError, ArithmeticError):
    """A gradient of some rank is infinite or NaN; raised on every rank."""

    on_every_rank = True


class PipelineFailed(MpisgdError, RuntimeError):
    """Another rank of a pipeline has raised; says which, at what, and its error. Raised on all others."""


class CheckpointDamaged(CheckpointError):
    """A file is truncated, changed, or not a checkpoint."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The content of a checkpoint does not fit the objects; nothing was loaded."""


class JobError(MpisgdError, RuntimeError):
    """For a program's user to fix: a wrong file, option or number of ranks.

    Uncaught, its text is printed once for the whole job, as one line, and the job ends with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
