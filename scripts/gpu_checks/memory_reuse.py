"""No memory is handed out again while an operation still uses it on another stream.

torch's allocator hands freed memory out at once on the stream that it belongs to, unless `record_stream` told
it of others. What is missing there shows as foreign values, and only where another stream is late.
"""

from __future__ import annotations

import time

import torch

import mpisgd
import mpisgd.horovod as hvd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu, everyones

__all__ = ["of_horovod", "of_packed_tensors"]

N = 300_000  # more than a MiB: the allocator has blocks of its own for what is small
FOREIGN = 7777.0
LET_GO_S = 0.15  # NCCL's watchdog knows what has ended until it looks again


def of_packed_tensors(gpu: Gpu) -> Finding:
    """A strided tensor is packed on one stream, and unpacked on a second one that is late.

    first    fill | pack | (all_reduce)    | take as much memory as was packed, fill it
    second                     sleep       | wait | unpack
    """
    _need_reuse(gpu)
    total = sum(range(1, mpisgd.size() + 1))
    first, second = gpu.stream(), gpu.stream()
    rounds, wrong, small = 3 if gpu.quick else 20, 0, gpu.zeros(1)
    for _ in range(rounds):
        strided = gpu.zeros(N, 2)[:, 1]
        with gpu.on(first):
            strided.fill_(mpisgd.rank() + 1.0)
            work = mpisgd.all_reduce(strided, async_op=True)
        with gpu.on(second):
            gpu.sleep(4 * LET_GO_S)
            work.wait()
        del work
        mpisgd.all_reduce(small)  # a group knows its last operation's memory until the next one
        time.sleep(LET_GO_S)
        with gpu.on(first):
            foreign = [torch.full((N,), FOREIGN, device=gpu.kind) for _ in range(3)]
        gpu.synchronize()
        wrong += int((strided != total).sum())
        del foreign
    return Finding.of(
        wrong == 0,
        f"the sum {total} in every element",
        f"{wrong} elements of {rounds * N} are wrong, in {rounds} rounds",
    )


def of_horovod(gpu: Gpu) -> Finding:
    """Horovod's operations in two side streams in turn, whose inputs and results are dropped at once."""
    _need_reuse(gpu)
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    sides = [gpu.stream(), gpu.stream()]
    wrong = gpu.zeros(2, dtype=torch.int64)
    rounds = 60 if gpu.quick else 1000
    for k in range(rounds):
        side = sides[k % 2]
        with gpu.on(side):
            gpu.sleep(0.002)
            given = torch.full((N,), float(k + rank), device=gpu.kind)
            handle = hvd.allreduce_async(given, op=hvd.Sum)
            del given
            while not hvd.poll(handle):
                time.sleep(0)
            foreign = torch.full((N,), FOREIGN, device=gpu.kind)  # where the input was, if that is free
            result = hvd.synchronize(handle)
            gpu.sleep(0.002)
            wrong[k % 2] += (result != float(size * k + sum(range(size)))).sum()
            del result, foreign
    gpu.synchronize()
    found = int(wrong.sum())
    hvd.shutdown()
    return Finding.of(
        found == 0,
        "the sum in every element",
        f"{found} elements of {rounds * N} are wrong, in {rounds} rounds",
    )


def _need_reuse(gpu: Gpu) -> None:
    """Leave a check out where freed memory is not handed out while another stream is about to read it.

    Raises:
        LeftOut: the same procedure in plain torch shows nothing.
    """
    first, second = gpu.stream(), gpu.stream()
    into = gpu.zeros(N)
    with gpu.on(first):
        freed = torch.zeros(N, device=gpu.kind)
    gpu.synchronize()
    with gpu.on(second):
        gpu.sleep()
        into.copy_(freed)
    del freed
    with gpu.on(first):
        foreign = [torch.full((N,), FOREIGN, device=gpu.kind) for _ in range(3)]
    gpu.synchronize()
    is_seen = bool((into == FOREIGN).all())
    del foreign
    if not all(everyones(is_seen)):
        raise LeftOut(
            "the control saw no foreign values: this allocator does not hand freed memory out at once"
        )
