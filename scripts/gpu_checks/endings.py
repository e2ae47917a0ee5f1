"""Waits that end early, operations that are aborted, ranks that are lost: what is left, and what goes on."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import torch

import mpisgd
from gpu_checks.gpu import Finding, Gpu
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import current_job

N = 1000


def limit_of_a_wait(gpu: Gpu) -> Finding:
    """A `wait(timeout_s)` that ends early leaves the operation alone, and the wait can be repeated."""
    total = sum(range(1, mpisgd.size() + 1))
    mpisgd.all_reduce(gpu.zeros(1))
    side, tensor, after = gpu.stream(), gpu.zeros(N), gpu.zeros(N) + 1
    with gpu.on(side):
        gpu.sleep(1.0)
        tensor.fill_(mpisgd.rank() + 1.0)
        work = mpisgd.all_reduce(tensor, async_op=True)
        try:
            work.wait(0.1)
            first = "the first wait returned"
        except mpisgd.CollectiveTimeout:
            first = "CollectiveTimeout"
        except mpisgd.MpisgdError as exc:
            first = f"{type(exc).__name__}: {exc}"
        with _told() as errors:
            work.wait()
            mpisgd.all_reduce(after)
    side.synchronize()
    is_right = bool((tensor == total).all()) and bool((after == mpisgd.size()).all()) and not errors
    then = errors[0] if errors else "the right sums" if is_right else "wrong sums"
    return Finding.of(
        first == "CollectiveTimeout" and is_right,
        "CollectiveTimeout after 0.1 s; then another wait and another operation give the right sums",
        f"{first}; then {then}",
    )


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """The errors of mpisgd inside."""
    errors: list[str] = []
    try:
        yield errors
    except mpisgd.MpisgdError as exc:
        errors.append(f"{type(exc).__name__}: {exc}")


def limit_of_a_group(gpu: Gpu) -> Finding:
    """The group's own timeout passes while the GPU is busy: no process is ended by it.

    The host waits for the GPU by `.item()`, where nothing of mpisgd runs.
    """
    limit_s, busy_s = 2.0, 6.0
    group = open_group(current_job(), range(mpisgd.size()), name="with a timeout", timeout_s=limit_s)
    mpisgd.all_reduce(gpu.zeros(1), group=group)
    tensor, begun = gpu.zeros(N) + (mpisgd.rank() + 1), time.monotonic()
    total = sum(range(1, mpisgd.size() + 1))
    found = 0.0
    with _told() as errors:
        gpu.sleep(busy_s)
        mpisgd.all_reduce(tensor, group=group)
        found = float(tensor.max())
        mpisgd.all_reduce(gpu.zeros(1), group=group)  # tells of what was ended, if anything was
        mpisgd.barrier(group)
    with contextlib.suppress(mpisgd.MpisgdError):  # what has failed is left, and may say so again
        close_group(group)
    took_s = time.monotonic() - begun
    told = errors[0] if errors else f"{found:g}"
    return Finding.of(
        bool(errors) or found == total,
        f"the sum {total}, or an error of mpisgd at the next operation; every process goes on",
        f"after {took_s:.1f} s, with a timeout of {limit_s:g} s: {told}",
        seconds=took_s,
    )


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
