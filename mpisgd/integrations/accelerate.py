"""Hugging Face under mpirun: call `use_mpi()`, then make the `Accelerator`, or transformers' arguments.

Accelerate chooses the backend by the device. On a CPU it accepts only its own ones, and without `cpu=True`
every rank trains alone, without a warning. It accepts any process group that exists already.
"""

import os

import torch
import torch.distributed as dist
from accelerate import PartialState

from mpisgd.torch_backend.plugin import BACKEND

__all__ = ["use_mpi"]


def use_mpi(cpu: bool | None = None) -> None:
    """Make Accelerate use the ranks that mpirun has started; call it before anything of Accelerate's.

    Collective over the job.

    Args:
        cpu: train on the CPU; defaults to True without a GPU. `Accelerator(cpu=...)` and
            `TrainingArguments(use_cpu=...)` need not repeat it.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    # Between hosts Accelerate requires an address, which it does not use since the process group exists.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Otherwise every rank warns and sets its threads; mpisgd has set them already.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    on_cpu = not torch.cuda.is_available() if cpu is None else cpu
    if on_cpu:  # transformers' Trainer makes the state anew, and without this every rank would train alone
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    state = PartialState(cpu=on_cpu)
    if state.backend is not None:  # Accelerate chooses the all-gather by it
        state.backend = BACKEND
