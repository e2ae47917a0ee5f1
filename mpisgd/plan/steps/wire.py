"""What a bucket of gradients is on the wire: the collectives, bytes and seconds of each compressor.

The bytes are those of the compressors' own `bytes_on_the_wire`; reducers are made for them on the meta
device, where a residual of billions of elements takes no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from mpisgd.compress.compressor import BucketLayout, Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.methods.cast.cast import Cast
from mpisgd.methods.per_host.per_host import PerHost
from mpisgd.methods.power_sgd.power_sgd import PowerSGD
from mpisgd.methods.random_k.random_k import RandomK
from mpisgd.plan.cluster import Cluster

__all__ = ["SECONDS_PER_ELEMENT", "Operation", "Wire", "dtype_of", "seconds_per_element", "wire_of"]

Shape = tuple[int, ...]

# What compressing and decompressing an element takes, in seconds, by the compressor's class: estimates for a
# core of a CPU. They differ by model and machine; a cluster file may have measured ones.
SECONDS_PER_ELEMENT = {
    "Cast": 1e-9,
    "PowerSGD": 10e-9,
    "TopK": 15e-9,
    "RandomK": 10e-9,
    "DeepGradient": 20e-9,
    "Threshold": 5e-9,
    "OneBit": 5e-9,
    "SignSGD": 5e-9,
    "QSGD": 30e-9,
    "TernGrad": 30e-9,
    "Natural": 30e-9,
}
UNKNOWN_S = 20e-9
# Of the memory of that core. Compressors read and write more than they compute.
REFERENCE_BYTES_PER_S = 1e10
# What decompressing and adding up takes for each byte that arrives from another rank.
ARRIVED_S_PER_BYTE = 2e-9
# An all-reduce sends 2 (p - 1) / p of its bytes; these are such sums, PowerSGD two after one another.
SUMS = {Cast: 1, RandomK: 1, PowerSGD: 2}


class Operation(NamedTuple):
    """A collective.

    Attributes:
        collective: "all_reduce", "all_gather", ...
        nbytes: of what it is about: for all_gather, what everyone has in the end.
        cluster: the ranks that take part.
    """

    collective: str
    nbytes: float
    cluster: Cluster


@dataclass(frozen=True)
class Wire:
    """A bucket on the wire.

    Attributes:
        operations: one after the other.
        sent_bytes: of each rank that sends, by the formula of the compressor.
        compute_s: of compressing and decompressing.
    """

    operations: tuple[Operation, ...]
    sent_bytes: int
    compute_s: float = 0.0


def wire_of(
    cluster: Cluster,
    compression: Compressor,
    shapes: Sequence[Shape],
    itemsize: int,
    seconds: Mapping[str, float] | None = None,
) -> Wire:
    """Return what becomes of a bucket of gradients of these shapes.

    Args:
        cluster: all ranks.
        compression: what travels.
        shapes: of the gradients.
        itemsize: bytes of an element: 4, or 2 or 8.
        seconds: of an element, by the compressor as it prints, or its class; before SECONDS_PER_ELEMENT.
    """
    dtype = dtype_of(itemsize)
    layout = BucketLayout(tuple(map(torch.Size, shapes)), dtype, torch.device("meta"))
    if not compression.changes(dtype) or cluster.size == 1:
        nbytes = layout.numel * itemsize
        plain = Operation("all_reduce", nbytes, cluster)
        return Wire((plain,), 2 * (cluster.size - 1) * nbytes // cluster.size)
    if isinstance(compression, PerHost):
        return _per_host(cluster, compression, shapes, itemsize, seconds)
    sent = sent_bytes(compression, layout, cluster.size)
    compute_s = layout.numel * seconds_per_element(cluster, compression, seconds or {})
    if type(compression) not in SUMS:  # what comes from the others is decompressed, too
        compute_s += sent * ARRIVED_S_PER_BYTE * REFERENCE_BYTES_PER_S / cluster.memory_bytes_per_s
    return Wire(tuple(_operations(cluster, compression, sent)), sent, compute_s)


def dtype_of(itemsize: int) -> torch.dtype:
    """Return the floating dtype of so many bytes."""
    return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]


def _operations(cluster: Cluster, compression: Compressor, sent: int) -> list[Operation]:
    """Return collectives in which each rank sends so many bytes."""
    size = cluster.size
    if num_sums := SUMS.get(type(compression), 0):
        each = sent * size / (2 * (size - 1)) / num_sums * _wider_on_the_way(cluster, compression)
        return [Operation("all_reduce", each, cluster)] * num_sums
    return [Operation("all_gather", sent * size / (size - 1), cluster)]


def _wider_on_the_way(cluster: Cluster, compression: Compressor) -> float:
    """Return by what more bytes count: a host's sum of 16-bit floats goes to others as float32."""
    if not isinstance(compression, Cast) or cluster.ranks_per_host == 1:
        return 1.0
    return 1.5 if cluster.hosts > 1 else cluster.half_factor


def _per_host(
    cluster: Cluster,
    compression: PerHost,
    shapes: Sequence[Shape],
    itemsize: int,
    seconds: Mapping[str, float] | None,
) -> Wire:
    """Return a mean on each host, what the compressor does among the hosts' first ranks, and a copy back."""
    inner = Wire((), 0)
    if cluster.hosts > 1:
        inner = wire_of(cluster.leaders, compression.compressor, shapes, itemsize, seconds)
    if cluster.ranks_per_host == 1:
        return inner
    nbytes = sum(torch.Size(shape).numel() for shape in shapes) * itemsize
    on_host = Operation("all_reduce", nbytes, cluster.at(cluster.ranks_per_host))
    return Wire((on_host, *inner.operations), inner.sent_bytes, inner.compute_s)


@lru_cache(maxsize=4096)
def sent_bytes(compression: Compressor, layout: BucketLayout, size: int) -> int:
    """Return what each of `size` ranks sends of a bucket."""
    try:
        return compression.reducer(layout).bytes_on_the_wire(size)
    except NotImplementedError as exc:  # something that needs the numbers themselves
        raise InvalidArgument(f"plan: the bytes of {compression} depend on the gradients") from exc


def seconds_per_element(cluster: Cluster, compression: Compressor, given: Mapping[str, float]) -> float:
    """Return what compressing and decompressing an element takes: as given, or by the rate of memory."""
    names = (repr(compression), type(compression).__name__)
    for name in names:
        if name in given:
            return given[name]
    known = next((SECONDS_PER_ELEMENT[name] for name in names if name in SECONDS_PER_ELEMENT), UNKNOWN_S)
    return known * REFERENCE_BYTES_PER_S / cluster.memory_bytes_per_s
