"""A group begins anew after its operations were aborted, and groups that are closed leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time

import torch

import mpisgd
from gpu_checks.finding import Finding
from gpu_checks.gpu import Gpu
from mpisgd.job.groups import close_group

__all__ = ["abort_and_reopen"]

GROUPS = 20
# What MPI and NCCL may keep for the next one; by NCCL each group keeps the file of its store (`open_store`).
SPARE = {"MiB of the GPU": 64, "threads": 4, "files": 16 + GROUPS}
SETTLE_S = 1.0  # threads that have been told to end do so by then


def abort_and_reopen(gpu: Gpu) -> Finding:
    """Abort what is in flight, use the group again, then open and close groups."""
    total, wrong = mpisgd.size(), []
    group = mpisgd.new_group()
    _sum(gpu, group)
    outcome = _abort(gpu, group)
    if (found := _sum(gpu, group)) != total:
        wrong.append(f"{found:g} after the abort")
    close_group(group)
    held: list[dict[str, int]] = []
    for number in range(GROUPS):
        group = mpisgd.new_group()
        if (found := _sum(gpu, group)) != total:
            wrong.append(f"{found:g} in group {number}")
        close_group(group)
        if number in (1, GROUPS - 1):
            held.append(_held(gpu))
    grown = {name: held[1][name] - held[0][name] for name in SPARE}
    wrong += [f"{more} more {name} than after two" for name, more in grown.items() if more > SPARE[name]]
    return Finding.of(
        outcome in ("aborted", "CollectiveMismatch") and not wrong,
        f"the abort is told; the sum {total} in the group and in {GROUPS} others, which leave nothing behind",
        f"{outcome}; {'; '.join(wrong) or 'the right sums'}",
        **{name: float(more) for name, more in grown.items()},
    )


def _sum(gpu: Gpu, group: mpisgd.Group) -> float:
    tensor = torch.ones(1000, device=gpu.kind)
    mpisgd.all_reduce(tensor, group=group)
    return float(tensor.max())


def _abort(gpu: Gpu, group: mpisgd.Group) -> str:
    """Have an operation aborted: by a mismatch between ranks, or alone by what a mismatch calls."""
    tensor = gpu.zeros(1000 + mpisgd.rank())
    side = gpu.stream()
    try:
        with gpu.on(side):
            gpu.sleep(0.5)
            mpisgd.all_reduce(tensor, group=group)
        mpisgd.barrier(group)
    except mpisgd.CollectiveMismatch:
        return "CollectiveMismatch"
    except mpisgd.MpisgdError as exc:
        return f"{type(exc).__name__}: {exc}"
    if mpisgd.size() > 1:
        return "no error, though the ranks gave different sizes"
    group.queue.on_mismatch()
    gpu.synchronize()
    return "aborted"


def _held(gpu: Gpu) -> dict[str, int]:
    """What this process has of what a group could keep, without threads that are about to end."""
    gpu.forget_ended_communicators()
    gc.collect()
    time.sleep(SETTLE_S)
    used = gpu.memory_in_use()
    if not gpu.is_simulated:  # NCCL's own memory is none of torch's
        free, total = gpu.module.mem_get_info()
        used = total - free
    files = len(os.listdir("/proc/self/fd"))
    return {"MiB of the GPU": used >> 20, "threads": threading.active_count(), "files": files}
