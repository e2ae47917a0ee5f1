"""The exceptions of mpisgd, one tree.

    MpisgdError
     +-- NotInitialized       RuntimeError     the job's world is needed and not to be had
     +-- AlreadyInitialized   RuntimeError     init() with another communicator
     +-- MpiNotFound          ImportError      no MPI library on this machine
     +-- MpiFailed            RuntimeError     the MPI library reported an error
     |    +-- PeerLost        ConnectionError  ... because a rank went away
     +-- StateLost            RuntimeError     elastic: what only the lost ranks had
     +-- Unreachable          ConnectionError  no TCP between the hosts; RuntimeError too
     +-- NcclFailed           RuntimeError     NCCL reported an error
     +-- InvalidRank          ValueError       a rank that the group does not have
     +-- NotInGroup           ValueError       this rank is not a member of the group
     +-- UnsupportedTensor    TypeError        a layout, device or dtype that cannot travel
     +-- UnsupportedOp        TypeError        an operation the dtype does not have
     +-- UnsupportedTorch     RuntimeError     this version of torch lacks what is asked for
     +-- ShapeMismatch        ValueError       sizes disagree on this rank, before anything was sent
     +-- InvalidArgument      ValueError       any other argument that makes no sense
     +-- CollectiveMismatch   RuntimeError     the ranks called different things; raised on every rank
     |    +-- Deadlock                          ... or wait for each other for ever
     +-- CollectiveTimeout    TimeoutError     waited longer than the timeout; RuntimeError too
     +-- OutOfSync            RuntimeError     the ranks hold different parameters; raised on every rank
     +-- NonFiniteGradients   ArithmeticError  a gradient is infinite or NaN; raised on every rank
     +-- CheckpointError      RuntimeError     could not be written, or there is none; raised on every rank
     |    +-- CheckpointDamaged    RuntimeError     ... a file that is not what was written
     |    +-- CheckpointMismatch   ValueError       ... it holds something else than what is to be loaded
     +-- JobError             RuntimeError     a program's own "this cannot work", without a traceback

Every leaf also is the builtin it means, so `except ValueError` catches what one expects.
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
    "OutOfSync",
    "PeerLost",
    "ShapeMismatch",
    "StateLost",
    "Unreachable",
    "UnsupportedOp",
    "UnsupportedTensor",
    "UnsupportedTorch",
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


class StateLost(MpisgdError, RuntimeError):
    """Ranks were lost, and with them a piece of an elastic state that no other rank has; on every rank."""

    on_every_rank = True


class Unreachable(MpisgdError, ConnectionError, RuntimeError):
    """Between the hosts of the job there is MPI, but no TCP connection; raised on every rank.

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
    """A tensor that cannot travel: sparse, on another device, an unknown dtype."""


class UnsupportedOp(MpisgdError, TypeError):
    """A reduction that the dtype does not have, such as MAX of complex numbers."""


class UnsupportedTorch(MpisgdError, RuntimeError):
    """This version of torch lacks what is asked for."""


class ShapeMismatch(MpisgdError, ValueError):
    """Sizes disagree on this rank; nothing was sent."""


class InvalidArgument(MpisgdError, ValueError):
    """An argument that makes no sense; nothing was sent."""


class CollectiveMismatch(MpisgdError, RuntimeError):
    """Ranks of a group called different operations; every one of them raises this, nothing was sent."""

    on_every_rank = True


class Deadlock(CollectiveMismatch):
    """Ranks wait for each other, or for one that has left, and none of them can ever go on.

    Raised on all of them within seconds; the groups in which they waited cannot be used any more.
    """


class CollectiveTimeout(MpisgdError, TimeoutError, RuntimeError):
    """Other ranks did not come within the timeout; the group cannot be used any more.

    A RuntimeError too: that is what torch's own backends raise, and what programs for them catch.
    """


class OutOfSync(MpisgdError, RuntimeError):
    """The ranks hold different parameters, which they should have in common; raised on every rank."""

    on_every_rank = True


class CheckpointError(MpisgdError, RuntimeError):
    """A checkpoint could not be written, or there is none to load; every rank raises this."""

    on_every_rank = True


class NonFiniteGradients(MpisgdError, ArithmeticError):
    """Backward has made an infinity or a NaN on some rank; raised on every rank."""

    on_every_rank = True


class CheckpointDamaged(CheckpointError):
    """A file is not what was written: cut short, changed, or never a checkpoint."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint holds something else than what is to be loaded from it; nothing was loaded."""


class JobError(MpisgdError, RuntimeError):
    """What a program raises when its user must change something: a file, an option, the number of ranks.

    Uncaught, its text is printed as one line, once for the whole job, and the job ends with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
