"""`estimate_memory`: what each rank will keep in memory for a training, by strategy, before it is started.

For P bytes of parameters, as many of gradients, S of optimizer state (and of float32 copies, with mixed
precision), on n ranks of which m share a host:

    strategy                   parameters    gradients    optimizer state
    Synchronous                P             P            S
    Sharded(stage=1)           P             P            S / n
    Sharded(stage=2)           P             P / n        S / n
    with share_parameters      P / m

Source: Rajbhandari and others, "ZeRO", 2020, figure 1; there P is 2 bytes and S is 12 bytes per parameter.
Activations are left out: they depend on the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.bucketing import ALIGN_BYTES, Item, join_buckets, plan_buckets
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES
from mpisgd.optim.state_bytes import OptimizerLike, state_bytes
from mpisgd.sharding.division import assign
from mpisgd.sharding.elementwise import KNOWN

__all__ = ["MemoryEstimate", "MemoryEstimates", "estimate_memory"]

COLUMNS = ("strategy", "parameters", "gradients", "optimizer state", "buckets", "total")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that the rank which has most of them keeps.

    Attributes:
        strategy: what `DistributedOptimizer` is given.
        parameters: of the model, and its buffers; shared memory counts 1/m for each of m ranks.
        gradients: from the end of backward until the step.
        optimizer_state: copies in a higher precision included.
        buckets: gradients on their way, beside `gradients`, at the most.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer_state: int
    buckets: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets

    def __str__(self) -> str:
        """The same in one line."""
        parts = (self.parameters, self.gradients, self.optimizer_state, self.buckets, self.total)
        named = ", ".join(f"{name} {as_size(n)}" for name, n in zip(COLUMNS[1:], parts, strict=True))
        return f"{self.strategy}: {named}"


@dataclass(frozen=True)
class MemoryEstimates:
    """One estimate for each strategy; iterates over them, and prints as a table.

    Attributes:
        ranks: how many train together.
        ranks_per_host: how many of them share a host.
        estimates: of the strategies.
    """

    ranks: int
    ranks_per_host: int
    estimates: tuple[MemoryEstimate, ...]

    def __iter__(self) -> Iterator[MemoryEstimate]:
        """Yield the estimates."""
        return iter(self.estimates)

    def __getitem__(self, strategy: str) -> MemoryEstimate:
        """Return the estimate of a strategy, as its line is called."""
        return next(estimate for estimate in self.estimates if estimate.strategy == strategy)

    def __str__(self) -> str:
        """A table, a strategy per line."""
        rows = [COLUMNS, *(_row(estimate) for estimate in self.estimates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)) for row in rows]
        return "\n".join([f"each of {self.ranks} ranks, {self.ranks_per_host} per host", "", *lines])


def _row(estimate: MemoryEstimate) -> tuple[str, ...]:
    e = estimate
    numbers = (e.parameters, e.gradients, e.optimizer_state, e.buckets, e.total)
    return (e.strategy, *map(as_size, numbers))


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    yield row[0].ljust(widths[0])
    yield from (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))


def as_size(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000, as papers give it."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((i for i in range(4) if nbytes < 1000 ** (i + 1)), 4)
    return f"{nbytes / 1000**power:.4g} {units[power]}"


def estimate_memory(
    model: torch.nn.Module | Sequence[Tensor],
    optimizer: OptimizerLike | None = None,
    *,
    ranks: int = 1,
    ranks_per_host: int | None = None,
    master_dtype: torch.dtype | None = None,
    state_per_parameter: float | None = None,
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES,
) -> MemoryEstimates:
    """Return what each rank will keep in memory, for every way of dividing it. Needs no job, and no memory.

    Args:
        model: its parameters may be without values (`with torch.device("meta"):`), so a model that fits into
            no machine can be asked about.
        optimizer: over these parameters, unchanged; or what makes one, such as `torch.optim.AdamW`. None:
            plain SGD, which keeps nothing.
        ranks: how many train together.
        ranks_per_host: how many of them share a host; None: all.
        master_dtype: see `Sharded`; in all lines, so that they compare.
        state_per_parameter: bytes of optimizer state per parameter, for an optimizer that cannot be asked.
        bucket_cap_bytes: see `DistributedOptimizer`.

    Raises:
        InvalidArgument: a number makes no sense, or the optimizer cannot be asked.
    """
    check_positive("estimate_memory", "ranks", ranks, whole=True)
    here = ranks if ranks_per_host is None else ranks_per_host
    check_positive("estimate_memory", "ranks_per_host", here, whole=True)
    check_positive("estimate_memory", "bucket_cap_bytes", bucket_cap_bytes, whole=True)
    if here > ranks:
        raise InvalidArgument(f"estimate_memory: ranks_per_host={here} of ranks={ranks}")
    params, nbytes_of_buffers = _tensors_of(model)
    trained = [param for param in params if param.requires_grad]
    states = _states(trained, optimizer, master_dtype, state_per_parameter)
    gradients = [param.nbytes for param in trained]
    cuts = optimizer is None or _is_elementwise(optimizer)
    fused, in_turn = _bucket_bytes(trained, bucket_cap_bytes)
    ways: list[tuple[str, int, int, int]] = [("Synchronous()", sum(gradients), sum(states), fused)]
    if ranks > 1:
        state, gradient = _shard(states, ranks, cuts), _shard(gradients, ranks, cuts)
        ways.append(("Sharded(stage=1)", sum(gradients), state, fused))
        ways.append(("Sharded(stage=2)", gradient, state, in_turn))
    nbytes = sum(param.nbytes for param in params)
    estimates = [MemoryEstimate(way[0], nbytes + nbytes_of_buffers, *way[1:]) for way in ways]
    if here > 1:
        nbytes = -(-nbytes // here) + nbytes_of_buffers
        estimates += [MemoryEstimate(f"{way[0]}, share_parameters", nbytes, *way[1:]) for way in ways]
    return MemoryEstimates(ranks, here, tuple(estimates))


def _tensors_of(model: torch.nn.Module | Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Return the parameters, each once, and the bytes of the buffers."""
    if isinstance(model, torch.nn.Module):
        return list(model.parameters()), sum(buffer.nbytes for buffer in model.buffers())
    return list(model), 0


def _states(
    params: list[Tensor],
    optimizer: OptimizerLike | None,
    master_dtype: torch.dtype | None,
    state_per_parameter: float | None,
) -> list[int]:
    """Return what is kept for each parameter, the copy in a higher precision included."""
    dtype = master_dtype
    masters = {
        param.dtype: dtype
        for param in params
        if dtype is not None and param.is_floating_point() and param.dtype.itemsize < dtype.itemsize
    }
    if state_per_parameter is not None:
        states = [int(param.numel() * state_per_parameter) for param in params]
    else:
        states = [0] * len(params) if optimizer is None else state_bytes(optimizer, params, masters)
    copies = [p.numel() * masters[p.dtype].itemsize if p.dtype in masters else 0 for p in params]
    return [state + copy for state, copy in zip(states, copies, strict=True)]


def _is_elementwise(optimizer: OptimizerLike) -> bool:
    """Return whether ranks will own parts of parameters."""
    step = getattr(
        type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer, "step", None
    )
    wrapped = getattr(optimizer, "func", None)  # of a functools.partial
    return any(step is known.step or wrapped is known for known in KNOWN)


def _shard(sizes: Sequence[int], ranks: int, cuts: bool) -> int:
    """Return the largest part of a rank: an n-th, or whole parameters."""
    if cuts:
        return -(-sum(sizes) // ranks)
    loads = [0] * ranks
    for owner, size in zip(assign(sizes, loads), sizes, strict=True):
        loads[owner] += size
    return max(loads)


def _bucket_bytes(params: Sequence[Tensor], cap_bytes: int) -> tuple[int, int]:
    """Return the bytes of the buckets of small gradients, and the most that is on its way at once, in turn.

    A gradient of ALONE_BYTES and more travels from where backward has put it.
    """
    items = [Item(i, p.numel(), p.element_size(), str(p.dtype)) for i, p in enumerate(params)]
    buckets = plan_buckets(items, cap_bytes=cap_bytes, align_bytes=ALIGN_BYTES, alone_bytes=ALONE_BYTES)
    sizes = [bucket.numel * params[bucket.indices[0]].element_size() for bucket in buckets]
    fused = [
        0 if len(bucket.indices) == 1 and size >= ALONE_BYTES else size
        for bucket, size in zip(buckets, sizes, strict=True)
    ]
    joined = join_buckets(sizes, cap_bytes)
    pool = max((sum(fused[place] for place in places) for places in joined), default=0)
    return sum(fused), pool + max((sum(sizes[place] for place in places) for places in joined), default=0)
