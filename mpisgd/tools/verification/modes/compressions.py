"""Compressed gradients: equal to what each method makes of the ranks' gradients, by its paper."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd import Compression, Compressor, compress
from mpisgd.job.rank_info import topology
from mpisgd.tools.verification.mode import TURNED, Mode, between_orders
from mpisgd.tools.verification.modes.synchronous import equal_to_one_process, native, sgd
from mpisgd.tools.verification.papers import paper_of
from mpisgd.tools.verification.problem import Problem
from mpisgd.tools.verification.trajectories import trajectory

__all__ = ["COMPRESSIONS"]


def plain(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without momentum, for what has its own."""
    return torch.optim.SGD(params, lr=0.05)


def _mode(
    name: str,
    compression: Compressor,
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> Mode:
    def simulate(problem: Problem, order: int) -> Tensor:
        definition = paper_of(compression=compression, size=problem.size)
        return trajectory(problem, make, definition, order, hosts=topology().nodes)

    train = native(make, compression=compression)
    return Mode(name, "compressions", train, between_orders(simulate), sizes=(2, 2**31), **options)


def adaptive(problem: Problem, _: int) -> Tensor:
    """Train with the adaptive sum, whose pairs have one order."""
    return trajectory(problem, sgd, paper_of(op=mpisgd.Adasum, size=problem.size))


def _equal(name: str, compression: Compressor) -> Mode:
    """Compressors that leave nothing out are equal to synchronous SGD."""
    train = native(sgd, compression=compression)
    return Mode(name, "compressions", train, equal_to_one_process(sgd), sizes=(2, 2**31), quick=False)


def _rounded(name: str, compression: Compressor, **options: Any) -> Mode:
    """Random rounding, in float64: in float32 a last digit decides too often which way a number goes."""
    return _mode(name, compression, plain, dtypes=(torch.float64,), **options)


COMPRESSIONS = (
    Mode("op=Adasum", "compressions", native(sgd, op=mpisgd.Adasum), between_orders(adaptive, TURNED)),
    _mode("bf16", Compression.bf16),
    _mode("fp16", Compression.fp16, quick=False),
    _mode("TopK(ratio=0.2)", compress.TopK(ratio=0.2)),
    _mode("Threshold(value=0.02)", compress.Threshold(value=0.02), quick=False),
    _mode("ChunkTopK(keep=2, chunk=10)", compress.ChunkTopK(keep=2, chunk=10), quick=False),
    _mode("DeepGradient(ratio=0.2)", compress.DeepGradient(ratio=0.2), plain),
    _mode("PowerSGD(rank=1)", compress.PowerSGD(rank=1)),
    _mode("OneBit()", compress.OneBit(), plain),
    _mode("OneBit(two_step=True)", compress.OneBit(two_step=True), plain, quick=False),
    _mode("BlockQuantized(bits=4, block=10)", compress.BlockQuantized(bits=4, block=10), quick=False),
    _mode("SignSGD()", compress.SignSGD(), plain),
    _mode("PerHost(TopK(ratio=0.2))", compress.PerHost(compress.TopK(ratio=0.2)), hosts=2),
    _mode("RandomK(ratio=0.2)", compress.RandomK(ratio=0.2)),
    _rounded("QSGD(bits=4, segment=10)", compress.QSGD(bits=4, segment=10)),
    _rounded("TernGrad()", compress.TernGrad(), quick=False),
    _rounded("Natural()", compress.Natural(), quick=False),
    _equal("TopK(ratio=1)", compress.TopK(ratio=1.0)),
    _equal("PowerSGD(rank=12)", compress.PowerSGD(rank=12, min_compression_rate=0.1)),
)
