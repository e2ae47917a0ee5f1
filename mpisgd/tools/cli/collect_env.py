"""What one rank can find out about itself: the material of `python -m mpisgd info`.

Nothing here communicates. What cannot be found out is the text "unknown (why)".
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mpisgd
from mpisgd import config
from mpisgd.accelerator.runtime import runtime
from mpisgd.cores import available_cores
from mpisgd.job import malloc_settings
from mpisgd.job.lifecycle import current_job, world
from mpisgd.transport.device.cuda_aware import is_cuda_aware, libmpi

__all__ = ["MpiInfo", "RankInfo", "mpi_info", "rank_info", "settings", "versions"]

SETTINGS = re.compile(r"(MPISGD|OMPI_MCA|PRTE_MCA|MPIR_CVAR|NCCL)_\w+")
MORE_SETTINGS = {*config.THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "I_MPI_FABRICS", "I_MPI_PIN"}
# How large tensors get their memory, which is felt in steps.
MORE_SETTINGS |= {"THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES", *malloc_settings.MALLOC_VARIABLES}
# Open MPI's mpirun puts these into every job.
NOT_SETTINGS = {"OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"}


@dataclass(frozen=True)
class MpiInfo:
    """The MPI library this rank runs on.

    Attributes:
        library: the first line of what it calls itself.
        libmpi: its file.
        thread_level: SINGLE, FUNNELED, SERIALIZED or MULTIPLE.
        fault_tolerance: whether it can survive a lost rank, and whether this run may.
    """

    library: str
    libmpi: str
    thread_level: str
    fault_tolerance: str


@dataclass(frozen=True)
class RankInfo:
    """One rank, its host and its software.

    Attributes:
        rank: in the job; 0 without MPI.
        node: number of its host.
        host: name of its host.
        versions: of Python and the packages.
        mpi: None where no MPI library was found.
        launched: number of ranks the launcher says it started, None without a launcher.
        cores_on_host: all of them.
        cores_for_job: those the job may use on this host.
        affinity: the cores this rank may run on.
        num_threads: torch threads.
        shared_memory: `total_bytes` and `free_bytes` of /dev/shm, or why they are unknown.
        freed_memory: what this process does with the memory that it frees.
        gpus: what torch sees, or why it sees none.
        nccl: its version, or why there is none.
        own_gpu: what tells the GPU this rank works on from the others of its host; "" for none.
        has_nccl: whether torch has it.
        cuda_aware: whether the MPI library takes addresses on a GPU.
        gpu_wanted: how GPU tensors are to travel.
        set_by_mpisgd: environment settings that `mpisgd.init()` made.
        set_before: those that were there already.
        planes: what the ranks of the job communicate through, besides MPI: `node`, `direct`, `hierarchical`.
        costs: the profile that algorithms are chosen by, or "built-in".
    """

    rank: int
    node: int
    host: str
    versions: dict[str, str]
    mpi: MpiInfo | None
    launched: int | None
    cores_on_host: int
    cores_for_job: int
    affinity: list[int]
    num_threads: int
    shared_memory: dict[str, int] | str
    gpus: str
    nccl: str
    set_by_mpisgd: dict[str, str]
    set_before: dict[str, str]
    planes: tuple[str, ...] = ()
    costs: str = "built-in"
    own_gpu: str = ""
    has_nccl: bool = False
    cuda_aware: bool = False
    gpu_wanted: str = "auto"
    freed_memory: str = ""


def rank_info(before: dict[str, str], mpi: MpiInfo | None) -> RankInfo:
    """Return the facts of this rank.

    Args:
        before: `settings()` as they were before `mpisgd.init()`.
        mpi: `mpi_info()`, or None where `mpisgd.init()` found no MPI.
    """
    added = {name: value for name, value in settings().items() if name not in before}
    return RankInfo(
        rank=mpisgd.rank() if mpi else config.launcher_rank() or 0,
        node=mpisgd.node_rank() if mpi else 0,
        host=socket.gethostname(),
        versions=versions(),
        mpi=mpi,
        launched=config.launcher_size(),
        cores_on_host=os.cpu_count() or 1,
        cores_for_job=available_cores(),
        affinity=sorted(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads(),
        shared_memory=_shared_memory(),
        gpus=_or_unknown(_gpus),
        nccl=_or_unknown(_nccl),
        set_by_mpisgd=added,
        set_before=before,
        planes=_planes() if mpi else (),
        costs=world().costs.source if mpi else "unknown (no MPI)",
        own_gpu=_or_unknown(_own_gpu),
        has_nccl=runtime().has_nccl(),
        cuda_aware=mpi is not None and is_cuda_aware(),
        gpu_wanted=current_job().gpu if mpi else "auto",
        freed_memory=malloc_settings.describe(),
    )


def settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of mpisgd, MPI, NCCL and torch's threads."""
    return {
        name: value
        for name, value in sorted(env.items())
        if (SETTINGS.fullmatch(name) or name in MORE_SETTINGS) and name not in NOT_SETTINGS
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    packages = {name: _package_version(name) for name in ("torch", "numpy", "mpi4py")}
    return {"mpisgd": mpisgd.__version__, "Python": platform.python_version(), **packages}


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"


def mpi_info() -> MpiInfo:
    """Return the facts of the MPI library; only after `mpisgd.init()`, since looking starts MPI."""
    from mpisgd.transport import mpi

    file, library = libmpi(), mpi.library_version()
    return MpiInfo(
        library=library,
        libmpi=file or "unknown (no such file among those this process has mapped)",
        thread_level=mpi.thread_level(),
        fault_tolerance=_fault_tolerance(library, file),
    )


def _fault_tolerance(library: str, libmpi: str | None) -> str:
    if libmpi is None:
        return "unknown (no libmpi file to look into)"
    try:
        there = hasattr(ctypes.CDLL(libmpi), "MPIX_Comm_revoke")
    except OSError as exc:
        return f"unknown ({exc})"
    if not there:
        return "no (this library is built without ULFM)"
    if not library.startswith("Open MPI"):
        return "ULFM is in this library; unknown whether on in this run (only Open MPI says)"
    if config.fault_tolerance():
        return "ULFM is in this library and on in this run"
    return "ULFM is in this library, off in this run (mpirun --with-ft ulfm)"


def _planes() -> tuple[str, ...]:
    return tuple(transport.name for transport in world().transports)


def _shared_memory() -> dict[str, int] | str:
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError as exc:
        return f"unknown (/dev/shm: {exc.strerror})"
    return {"total_bytes": room.total, "free_bytes": room.free}


def _or_unknown(look: Callable[[], str]) -> str:
    """Call `look`; an exception is text in its place: a broken driver must not spoil the report about it."""
    try:
        return look()
    except Exception as exc:
        return f"unknown ({type(exc).__name__}: {' '.join(str(exc).split())})"


def _gpus() -> str:
    if torch.version.cuda is None:
        return "none (this torch is built without CUDA)"
    if not torch.cuda.is_available():
        return f"none (this torch is built for CUDA {torch.version.cuda} and sees no device)"
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _own_gpu() -> str:
    if not torch.cuda.is_available():
        return ""
    return runtime().identity(torch.device("cuda", torch.cuda.current_device()))


def _nccl() -> str:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return "none (this torch is built without NCCL)"
    version: Any = torch.cuda.nccl.version  # not annotated
    return ".".join(map(str, version()))
