"""A rank ends while the others are in an operation of NCCL with it, and their hosts wait for the GPU."""

from __future__ import annotations

import os
import signal
import time

import mpisgd
from gpu_checks.finding import Finding
from gpu_checks.gpu import Gpu
from mpisgd.job.lifecycle import current_job

__all__ = ["survivors_get_an_error"]


def survivors_get_an_error(gpu: Gpu) -> Finding:
    """The last rank is killed before an all_reduce, behind which the others wait by `.item()`.

    What the GPU holds then is of no use; the next operation of mpisgd, or this one, must raise an error, and
    since the rank was lost, not since the operation has lasted too long.
    """
    mpisgd.all_reduce(gpu.zeros(1))
    gpu.synchronize()
    mpisgd.barrier()
    if mpisgd.rank() == mpisgd.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun, told = time.monotonic(), "no error"
    try:
        tensor = gpu.zeros(1000) + 1
        mpisgd.all_reduce(tensor)
        float(tensor.max())
        mpisgd.barrier()
    except mpisgd.MpisgdError as exc:
        told = f"{type(exc).__name__}: {exc}"
    except RuntimeError as exc:
        told = f"not an error of mpisgd: {type(exc).__name__}: {exc}"
    took_s = time.monotonic() - begun
    limit_s = current_job().timeout_s / 2
    return Finding.of(
        not told.startswith("no") and took_s < limit_s,
        f"an error of mpisgd within {limit_s:g} s",
        f"after {took_s:.1f} s: {told}",
        seconds=took_s,
    )
