"""Trainings: on a CPU and a GPU, in graphs, compiled, in mixed precision, and what a step of them takes.

What CUDA graphs and torch.compile do not refuse by an error of mpisgd must be right. In mixed precision with
the optimizer's state in host memory, what overflows on one rank is skipped by all.
"""

import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from gpu_checks.gpu import Finding, Gpu, LeftOut
from mpisgd.job.lifecycle import current_job

WORDS, EMBEDDED, NUM_WORDS = 50, 8, 6
JOINED_TOLERANCE = 1e-9  # of float64


class Model(nn.Module):
    """An embedding on the CPU below layers on a GPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.table = nn.Embedding(WORDS, EMBEDDED)
        layers = [layer for _ in range(4) for layer in (nn.Linear(EMBEDDED, EMBEDDED), nn.Tanh())]
        self.layers = nn.Sequential(*layers).to(device)

    def forward(self, words: Tensor) -> Tensor:
        """Losses of words."""
        losses: Tensor = self.layers(self.table(words).to(self.device)).square().sum(1)
        return losses


def embedding_below_gpu(gpu: Gpu) -> Finding:
    """Steps with tiny buckets equal those of one process on the joined batch.

    Autograd runs the hooks of both devices on several threads at once. Gradients are added, and not averaged:
    a bucket that two threads have sent would look right after two means.
    """
    torch.manual_seed(3)
    alone = Model(gpu.kind).double()
    ours = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.05),
        named_parameters=ours.named_parameters(),
        bucket_cap_bytes=64,
        overlap=True,
        op=mpisgd.ReduceOp.SUM,
    )
    steps, rank, size = 20 if gpu.quick else 500, mpisgd.rank(), mpisgd.size()
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (NUM_WORDS * size,), generator=draw)
        for model, opt, share in ((alone, plain, words), (ours, optimizer, words.chunk(size)[rank])):
            opt.zero_grad()
            (model(share).sum() / len(words)).backward()
            opt.step()
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    off = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    return Finding.of(
        off < JOINED_TOLERANCE,
        f"after {steps} steps the parameters of one process, up to {JOINED_TOLERANCE:g}",
        f"off by {off:.2g}",
    )


COMPILED_TOLERANCE = 1e-4  # of float32, in kernels that a compiler has joined


def operation_in_a_graph(gpu: Gpu) -> Finding:
    """Capture an all_reduce in a CUDA graph, and replay it."""
    if not hasattr(gpu.module, "CUDAGraph"):
        raise LeftOut("the simulated device has no graphs")
    expected = "an error of mpisgd, or the right sum at every replay"
    total = sum(range(1, mpisgd.size() + 1))
    tensor = gpu.zeros(1000)
    mpisgd.all_reduce(tensor)
    graph = gpu.module.CUDAGraph()
    try:
        with gpu.module.graph(graph):
            mpisgd.all_reduce(tensor)
    except mpisgd.MpisgdError as exc:
        return Finding.of(True, expected, f"{type(exc).__name__}: {exc}")
    except RuntimeError as exc:
        return Finding.of(False, expected, f"{type(exc).__name__}: {exc}")
    found = []
    for _ in range(2):
        tensor.fill_(mpisgd.rank() + 1.0)
        graph.replay()
        found.append(float(tensor.max()))
    return Finding.of(found == [total] * 2, expected, f"{found}")


def compiled_model(gpu: Gpu) -> Finding:
    """A compiled model trains as one process does; a compiled function stops at an operation, and goes on.

    The simulated device has no compiler: its graphs are taken, and run as they are.
    """
    compiled = functools.partial(torch.compile, backend="eager" if gpu.is_simulated else "inductor")
    rank, size, steps = mpisgd.rank(), mpisgd.size(), 3 if gpu.quick else 10
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).to(gpu.kind)
    ours = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    forward = compiled(ours)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(6 * size, 8, generator=draw).to(gpu.kind)
        for call, opt, rows in ((alone, plain, inputs), (forward, optimizer, inputs.chunk(size)[rank])):
            opt.zero_grad()
            call(rows).square().mean().backward()
            opt.step()
    pairs = zip(alone.parameters(), ours.parameters(), strict=True)
    off = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    found = float(compiled(_doubled_sum)(gpu.zeros(100) + (rank + 1.0)).max())
    total = size * (size + 1) + 1.0
    return Finding.of(
        off < COMPILED_TOLERANCE and found == total,
        f"after {steps} steps the parameters of one process, up to {COMPILED_TOLERANCE:g}; "
        f"{total:g} of a function",
        f"off by {off:.2g}; {found:g}",
    )


def _doubled_sum(tensor: Tensor) -> Tensor:
    """Twice the sum of all ranks, and one more."""
    doubled = tensor * 2
    _add_up(doubled)
    return doubled + 1


@torch.compiler.disable
def _add_up(tensor: Tensor) -> None:
    mpisgd.all_reduce(tensor)


SCALED_STEPS, OVERFLOWS = 6, (2, 4)
SCALE = 8.0
OFFLOAD_TOLERANCE = 1e-6  # of float32; the means are added in another order


def overflow_with_offload(gpu: Gpu) -> Finding:
    """`Sharded(1, offload=Offload())` with a GradScaler trains as without an offload."""
    plain, plain_scale, _ = _train(gpu, mpisgd.Sharded(1))
    ours, scale, moved = _train(gpu, mpisgd.Sharded(1, offload=mpisgd.Offload()))
    off = max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))
    wanted = SCALE / 2 ** len(OVERFLOWS)
    is_finite = all(bool(param.isfinite().all()) for param in ours)
    return Finding.of(
        off < OFFLOAD_TOLERANCE and is_finite and scale == plain_scale == wanted and not moved,
        f"scale {wanted:g}; steps that overflow on rank 0 move no parameter; otherwise as without offload",
        f"scale {scale:g}; {len(moved)} such steps moved one; off by {off:.2g}",
    )


def _train(gpu: Gpu, strategy: mpisgd.Strategy) -> tuple[list[torch.Tensor], float, list[int]]:
    """Parameters, the last scale, and the steps that overflowed and changed parameters even so."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to(gpu.kind)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy=strategy)
    scaler = torch.amp.GradScaler(gpu.kind, init_scale=SCALE)
    moved = []
    for step in range(SCALED_STEPS):
        before = [param.detach().clone() for param in model.parameters()]
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(12, 4, generator=draw).chunk(mpisgd.size())[mpisgd.rank()].to(gpu.kind)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        overflows = step in OVERFLOWS
        if overflows and mpisgd.rank() == 0:  # in one element, of which another rank may have the state
            loss = loss + model[2].bias[-1] * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflows and any(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)):
            moved.append(step)
    return [param.detach().cpu() for param in model.parameters()], scaler.get_scale(), moved


LAYERS, WIDTH, BATCH = 8, 5792, 256  # 1 GiB of float32
SMALL_WIDTH = 64
WARM_UP, ROUNDS, STEPS = 3, 10, 5
MAX_RATIO = 1.03
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
COPIES = ("Memcpy DtoH", "Memcpy HtoD")


def large_model(gpu: Gpu) -> Finding:
    """Steps in turns; by NCCL the host must not wait for the GPU, and alone it must cost little."""
    plain = _Steps(gpu, lambda optimizer: optimizer)
    ours = _Steps(gpu, lambda optimizer: mpisgd.DistributedOptimizer(optimizer))
    ratio = _ratio(gpu, plain, ours)
    figures = {"ratio to the step without mpisgd": ratio, "step ms": ours.seconds * 1e3}
    figures |= {"memory MiB": ours.mib, "memory MiB without mpisgd": plain.mib}
    waits, copies = (b - a for a, b in zip(_host_work(gpu, plain), _host_work(gpu, ours), strict=True))
    figures |= {"host waits per step": waits, "copies from and to the host per step": copies}
    by_nccl = current_job().gpu != "mpi" and mpisgd.local_size() <= gpu.count
    is_timed = by_nccl and mpisgd.size() == 1 and not gpu.is_simulated
    expected = ["no wait of the host for the GPU, no copy"] if by_nccl else ["figures only"]
    expected += [f"at most {MAX_RATIO:g} times the step without mpisgd"] * is_timed
    holds = not by_nccl or (waits <= 0 and copies <= 0)
    return Finding.of(
        holds and (not is_timed or ratio <= MAX_RATIO),
        "; ".join(expected),
        f"{ratio:.3f} times the step without mpisgd; per step {waits:g} waits and {copies:g} copies more "
        f"than without; {ours.mib:.0f} MiB of memory, without {plain.mib:.0f}",
        **figures,
    )


class _Steps:
    """A model and its steps.

    Attributes:
        mib: memory that its steps took at most.
        seconds: median of a step, once it was timed.
    """

    def __init__(self, gpu: Gpu, wrapped: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> None:
        self._gpu, self.seconds = gpu, 0.0
        width = SMALL_WIDTH if gpu.quick or gpu.is_simulated else WIDTH
        before = gpu.memory_in_use()
        torch.manual_seed(1)
        with torch.device(gpu.kind):
            self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
            self._inputs = torch.ones(BATCH, width)
        self._optimizer = wrapped(torch.optim.SGD(self.model.parameters(), lr=1e-6))
        if not gpu.is_simulated:
            gpu.module.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            self.step()
        gpu.synchronize()
        most = gpu.memory_in_use() if gpu.is_simulated else gpu.module.max_memory_allocated()
        self.mib = (most - before) / 2**20

    def step(self) -> None:
        """Train once."""
        self._optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self._optimizer.step()

    def time(self) -> float:
        """Seconds of a step."""
        self._gpu.synchronize()
        mpisgd.barrier()
        begun = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        self._gpu.synchronize()
        return (time.perf_counter() - begun) / STEPS


def _ratio(gpu: Gpu, plain: _Steps, ours: _Steps) -> float:
    """How many times the median step takes, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(2 if gpu.quick else ROUNDS):
        for steps, seconds in zip((plain, ours), times, strict=True):
            seconds.append(steps.time())
    plain.seconds, ours.seconds = map(statistics.median, times)
    return ours.seconds / plain.seconds


def _host_work(gpu: Gpu, steps: _Steps) -> tuple[float, float]:
    """How often the host waits for the GPU in a step, and how many copies there are between them."""
    gpu.synchronize()
    with _counted(gpu) as counts:
        for _ in range(STEPS):
            steps.step()
    return counts["waits"] / STEPS, counts["copies"] / STEPS


@contextlib.contextmanager
def _counted(gpu: Gpu) -> Iterator[dict[str, int]]:
    """Counts of waits and copies inside, filled at the end."""
    counts = {"waits": 0, "copies": 0}
    if gpu.is_simulated:
        with _simulated_counts(gpu, counts):
            yield counts
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        yield counts
    for event in found.events():
        counts["waits"] += event.name in WAITS
        counts["copies"] += event.name.startswith(COPIES)


@contextlib.contextmanager
def _simulated_counts(gpu: Gpu, counts: dict[str, int]) -> Iterator[None]:
    """Count what the simulated device is asked to wait for, and what mpisgd copies."""
    from mpisgd.accelerator.runtime import runtime

    streams, copy = gpu.module.device.streams, runtime().copy
    wait = streams.synchronize

    def counted_wait(event: Any) -> None:
        counts["waits"] += 1
        wait(event)

    def counted_copy(*pair: Any) -> None:
        counts["copies"] += 1
        copy(*pair)

    streams.synchronize, runtime().copy = counted_wait, counted_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        del streams.synchronize, runtime().copy
