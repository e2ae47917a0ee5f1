"""What is used on another stream, in another operation or on another thread than where it began.

Beside each check stands a control, which shows that the other stream was late, or that freed memory is handed
out again: without that the check shows nothing, and is left out.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpisgd
import mpisgd.horovod as hvd
from gpu_checks.gpu import Finding, Gpu, LeftOut, everyones
from mpisgd.job.lifecycle import world
from mpisgd.threads.service_thread import InheritingThread
from mpisgd.torch_backend import bf16_compress

N = 1000


def by_mpisgd(gpu: Gpu) -> Finding:
    """By `mpisgd.all_reduce`."""
    return _used_elsewhere(gpu, lambda tensor: mpisgd.all_reduce(tensor, async_op=True).get_future())


def by_backend(gpu: Gpu) -> Finding:
    """By `torch.distributed` on the backend "mpisgd"."""
    with _process_group("mpisgd"):
        return _used_elsewhere(gpu, _of_torch)


def by_nccl_of_torch(gpu: Gpu) -> Finding:
    """By `torch.distributed` on its own NCCL: the control of the two above."""
    if mpisgd.size() > gpu.count:
        raise LeftOut("NCCL refuses two ranks on one GPU")
    with _process_group(gpu.nccl_backend()):
        return _used_elsewhere(gpu, _of_torch)


class Bucket:
    """DDP's, as far as a hook reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def buffer(self) -> Tensor:
        """The gradients."""
        return self._tensor


def by_hook(gpu: Gpu) -> Finding:
    """By `bf16_compress`, called as DDP calls it."""
    with _process_group("mpisgd"):
        mean = (mpisgd.size() + 1) / 2
        return _used_elsewhere(gpu, lambda tensor: bf16_compress(None, Bucket(tensor)), mean)


def _of_torch(tensor: Tensor) -> Any:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


def _used_elsewhere(gpu: Gpu, begin: Callable[[Tensor], Any], wanted: float | None = None) -> Finding:
    """Read results on another stream, some times, by somebody who knows of the future only.

        side     sleep | fill | (all_reduce)
        other                    | wait for the future | read

    A future that orders no streams lets `other` read zeros.

    Args:
        gpu: to do it on.
        begin: starts an operation and returns its future.
        wanted: its result; by default the sum of rank + 1.
    """
    total = sum(range(1, mpisgd.size() + 1)) if wanted is None else wanted
    begin(gpu.zeros(N)).wait()  # what is opened at the first time may take its time
    gpu.synchronize()
    rounds, wrong, unordered_is_early = 3 if gpu.quick else 10, 0, True
    for _ in range(rounds):
        side, other = gpu.stream(), gpu.stream()
        tensor = gpu.zeros(N)
        gpu.fill_late(tensor, mpisgd.rank() + 1.0, side)
        with gpu.on(other):
            unordered = tensor * 3
        other.synchronize()
        unordered_is_early &= bool((unordered == 0).all())
        with gpu.on(side):
            future = begin(tensor)
        with gpu.on(other):
            result = future.wait()
            seen = (result if isinstance(result, Tensor) else result[0]) * 3
        other.synchronize()
        wrong += bool((seen != 3 * total).any())
        gpu.synchronize()
    if not unordered_is_early:
        raise LeftOut("the control saw the fill, for which it does not wait: it was not late")
    return Finding.of(
        not wrong,
        f"{total:g} on the other stream; the control, which does not wait, sees 0",
        f"right in {rounds - wrong} of {rounds} rounds",
    )


def by_ddp_hook(gpu: Gpu) -> Finding:
    """By DDP on the backend "mpisgd" with the hook `bf16_compress`: forward and backward in a side stream."""
    with _process_group("mpisgd"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 4)).to(gpu.kind)
        second = model[1].weight.detach().clone()
        gpu.synchronize()
        side = gpu.stream()
        with gpu.on(side):
            parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        parallel.register_comm_hook(None, bf16_compress)
        inputs = torch.full((1, 8), mpisgd.rank() + 1.0, device=gpu.kind)
        gpu.synchronize()
        rounds, off = 2 if gpu.quick else 10, 0.0
        for _ in range(rounds):
            with gpu.on(side):
                parallel.zero_grad()
                gpu.sleep()
                parallel(inputs).sum().backward()
                grad = model[0].weight.grad * 1
            side.synchronize()
            mean = (mpisgd.size() + 1) / 2
            wanted = second.sum(0).unsqueeze(1).expand_as(grad) * mean
            off = max(off, float((grad - wanted).norm() / wanted.norm()))
    return Finding.of(
        off < 0.01,
        "gradients are the mean over the ranks, up to 0.01 by rounding to bfloat16",
        f"off by {off:.2g} of their norm at most, in {rounds} rounds",
    )


@contextlib.contextmanager
def _process_group(backend: str) -> Iterator[None]:
    """The default process group on a backend, inside."""
    if backend == "mpisgd":
        dist.init_process_group(backend)
    else:
        file = mpisgd.broadcast_object(tempfile.mktemp(prefix="gpu-check-"))
        dist.init_process_group(
            backend, init_method=f"file://{file}", rank=mpisgd.rank(), world_size=mpisgd.size()
        )
    yield
    dist.destroy_process_group()


NUM_OF_A_MESSAGE, TAGS = 100_000, 4


def crossing(gpu: Gpu) -> Finding:
    """To the next rank and from the one before, by NCCL where collectives go by it.

        side     sleep | fill | (isend)
        current                 recv | read

    All ranks send before they receive, the last tag first: what is sent comes late. A message that does not
    wait for the fill brings zeros.
    """
    mpisgd.all_reduce(gpu.zeros(1))
    rank, size = mpisgd.rank(), mpisgd.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    communicator = world().point_to_point.communicator
    sent_bytes = communicator.sent_bytes
    side, given, taken = gpu.stream(), gpu.zeros(TAGS, NUM_OF_A_MESSAGE), gpu.zeros(TAGS, NUM_OF_A_MESSAGE)
    with gpu.on(side):
        gpu.sleep()
        for tag in range(TAGS):
            given[tag].fill_(10.0 * rank + tag + 1)
    with gpu.on(gpu.stream()):
        was_late = bool((given.cpu() == 0).all())
    with gpu.on(side):
        sends = [mpisgd.isend(given[tag], after, tag=tag) for tag in range(TAGS)]
    for tag in reversed(range(TAGS)):
        mpisgd.recv(taken[tag], before, tag=tag)
    read = taken.cpu()
    with gpu.on(side):
        for work in sends:
            work.wait()
    if not was_late:
        raise LeftOut("the fill was not late")
    is_right = all(bool((read[tag] == 10.0 * before + tag + 1).all()) for tag in range(TAGS))
    by_mpi = communicator.sent_bytes - sent_bytes >= given.nbytes
    selected = world().device.selection.name
    values = "the values of the rank before" if is_right else "other values"
    return Finding.of(
        is_right and by_mpi == (selected != "nccl"),
        f"the values of the rank before, by {selected}",
        f"{values}, {'through the host' if by_mpi else 'by nccl'}",
    )


NUM_OF_A_BLOCK = 300_000  # more than a MiB: the allocator has blocks of its own for what is small
FOREIGN = 7777.0
LET_GO_S = 0.15  # NCCL's watchdog knows what has ended until it looks again


def of_packed_tensors(gpu: Gpu) -> Finding:
    """A strided tensor is packed on one stream, and unpacked on a second one that is late.

    torch's allocator hands freed memory out at once on the stream that it belongs to, unless `record_stream`
    told it of others. What is missing there shows as foreign values, and only where another stream is late.

    first    fill | pack | (all_reduce)    | take as much memory as was packed, fill it
    second                     sleep       | wait | unpack
    """
    _need_reuse(gpu)
    total = sum(range(1, mpisgd.size() + 1))
    first, second = gpu.stream(), gpu.stream()
    rounds, wrong, small = 3 if gpu.quick else 20, 0, gpu.zeros(1)
    for _ in range(rounds):
        strided = gpu.zeros(NUM_OF_A_BLOCK, 2)[:, 1]
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
            foreign = [torch.full((NUM_OF_A_BLOCK,), FOREIGN, device=gpu.kind) for _ in range(3)]
        gpu.synchronize()
        wrong += int((strided != total).sum())
        del foreign
    return Finding.of(
        wrong == 0,
        f"the sum {total} in every element",
        f"{wrong} elements of {rounds * NUM_OF_A_BLOCK} are wrong, in {rounds} rounds",
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
            given = torch.full((NUM_OF_A_BLOCK,), float(k + rank), device=gpu.kind)
            handle = hvd.allreduce_async(given, op=hvd.Sum)
            del given
            while not hvd.poll(handle):
                time.sleep(0)
            foreign = torch.full(
                (NUM_OF_A_BLOCK,), FOREIGN, device=gpu.kind
            )  # where the input was, if that is free
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
        f"{found} elements of {rounds * NUM_OF_A_BLOCK} are wrong, in {rounds} rounds",
    )


def _need_reuse(gpu: Gpu) -> None:
    """Leave a check out where freed memory is not handed out while another stream is about to read it.

    Raises:
        LeftOut: the same procedure in plain torch shows nothing.
    """
    first, second = gpu.stream(), gpu.stream()
    into = gpu.zeros(NUM_OF_A_BLOCK)
    with gpu.on(first):
        freed = torch.zeros(NUM_OF_A_BLOCK, device=gpu.kind)
    gpu.synchronize()
    with gpu.on(second):
        gpu.sleep()
        into.copy_(freed)
    del freed
    with gpu.on(first):
        foreign = [torch.full((NUM_OF_A_BLOCK,), FOREIGN, device=gpu.kind) for _ in range(3)]
    gpu.synchronize()
    is_seen = bool((into == FOREIGN).all())
    del foreign
    if not all(everyones(is_seen)):
        raise LeftOut(
            "the control saw no foreign values: this allocator does not hand freed memory out at once"
        )


def own_gpu_only(gpu: Gpu) -> Finding:
    """Look for contexts after operations of all kinds: one on another GPU costs half a GB there.

    A thread begins on GPU 0, whatever its starter's was. So mpisgd's begin on that of who starts them: what
    names no GPU, as a program's callback may, would land on GPU 0 otherwise. That is the control, on a thread
    of Python's own: its context on GPU 0 must be seen.
    """
    if gpu.count < 2:
        raise LeftOut("one GPU: there is no other one")
    own = gpu.module.current_device()
    model = torch.nn.Linear(4, 4).to(gpu.kind)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap=True)
    model(torch.ones(2, 4, device=gpu.kind)).sum().backward()
    optimizer.step()
    mpisgd.all_reduce(gpu.zeros(10), async_op=True).wait()
    mpisgd.all_reduce(gpu.zeros(10), algorithm="mpi", async_op=True).wait()
    _use_a_gpu(gpu, InheritingThread)
    hvd.init()
    hvd.allreduce(gpu.zeros(10))
    hvd.shutdown()
    gpu.synchronize()
    used = [number for number in range(gpu.count) if gpu.has_context(number)]
    _use_a_gpu(gpu, threading.Thread)
    if not all(everyones(gpu.has_context(0))) or not any(everyones(own > 0)):
        raise LeftOut("the control, a plain thread, left no context that was not there without it")
    return Finding.of(
        used == [own],
        f"a context on GPU {own} alone",
        f"on {', '.join(f'GPU {number}' for number in used) or 'none'}",
    )


def _use_a_gpu(gpu: Gpu, kind: type[threading.Thread]) -> None:
    """Make a tensor in a thread that names no GPU."""
    thread = kind(target=lambda: torch.ones(1, device=gpu.kind))
    thread.start()
    thread.join()
