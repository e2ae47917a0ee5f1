"""Operations behind a GPU that is busy for longer than somebody wants to wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import mpisgd
from gpu_checks.finding import Finding
from gpu_checks.gpu import Gpu
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import current_job

__all__ = ["limit_of_a_group", "limit_of_a_wait"]

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
