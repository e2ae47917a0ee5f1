"""Hugging Face Accelerate under mpirun: call `use_mpi()`, then make the `Accelerator`.

Accelerate chooses the backend by the device. On a CPU it takes no other than its own, and without `cpu=True`
every rank would train alone and say nothing of it. A process group that exists it accepts, whatever it is.
"""

import os

import torch
import torch.distributed as dist
from accelerate import PartialState

from mpisgd.torch_backend.plugin import BACKEND

__all__ = ["use_mpi"]


def use_mpi(cpu: bool | None = None) -> None:
    """Make the ranks that mpirun has started those of Accelerate; call it before anything of Accelerate's.

    Collective over the job.

    Args:
        cpu: train on the CPU; by default where there is no GPU. `Accelerator(cpu=...)` need not repeat it.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    # Between hosts Accelerate wants an address and does not use it, since the process group is there.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Else every rank warns and takes its part of the machine; mpisgd has done so already.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    state = PartialState(cpu=not torch.cuda.is_available() if cpu is None else cpu)
    if state.backend is not None:  # by it Accelerate decides which all-gather to call
        state.backend = BACKEND
