"""Compressed gradients: equal to what each method makes of the ranks' gradients, by its paper."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd import Compression, Compressor, compress
from mpisgd.job.rank_info import topology
from mpisgd.verification.mode import TURNED, Mode, between_orders
from mpisgd.verification.modes.synchronous import equal_to_one_process, native, sgd
from mpisgd.verification.problem import Problem
from mpisgd.verification.serial import compressors as serial
from mpisgd.verification.serial import random_compressors as random
from mpisgd.verification.serial.training import Combine, one_model

__all__ = ["COMPRESSIONS"]


def plain(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without momentum, for what has its own."""
    return torch.optim.SGD(params, lr=0.05)


def _mode(
    name: str,
    compression: Compressor,
    combine: Callable[[int], Combine],
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> Mode:
    def simulate(problem: Problem, order: int) -> Tensor:
        return one_model(problem, make, combine(order))

    train = native(make, compression=compression)
    return Mode(name, "compressions", train, between_orders(simulate), sizes=(2, 2**31), **options)


def adaptive(problem: Problem, _: int) -> Tensor:
    """Train with the adaptive sum, whose pairs have one order."""
    return one_model(problem, sgd, serial.adasum)


def _equal(name: str, compression: Compressor) -> Mode:
    """Compressors that leave nothing out are equal to synchronous SGD."""
    train = native(sgd, compression=compression)
    return Mode(name, "compressions", train, equal_to_one_process(sgd), sizes=(2, 2**31), quick=False)


def _rounded(name: str, compression: Compressor, combine: Callable[[int], Combine], **options: Any) -> Mode:
    """Random rounding, in float64: in float32 a last digit decides too often which way a number goes."""
    return _mode(name, compression, combine, plain, dtypes=(torch.float64,), **options)


COMPRESSIONS = (
    Mode("op=Adasum", "compressions", native(sgd, op=mpisgd.Adasum), between_orders(adaptive, TURNED)),
    _mode("bf16", Compression.bf16, lambda order: serial.cast(torch.bfloat16, order)),
    _mode("fp16", Compression.fp16, lambda order: serial.cast(torch.float16, order), quick=False),
    _mode(
        "TopK(ratio=0.2)",
        compress.TopK(ratio=0.2),
        lambda order: serial.error_feedback(serial.largest(0.2), order),
    ),
    _mode(
        "Threshold(value=0.02)",
        compress.Threshold(value=0.02),
        lambda order: serial.error_feedback(
            lambda meant: torch.where(meant.abs() >= 0.02, meant, torch.zeros_like(meant)), order
        ),
        quick=False,
    ),
    _mode(
        "DeepGradient(ratio=0.2)",
        compress.DeepGradient(ratio=0.2),
        lambda order: serial.deep_gradient(0.2, 0.9, order),
        plain,
    ),
    _mode("PowerSGD(rank=1)", compress.PowerSGD(rank=1), lambda order: serial.power_sgd(1, order)),
    _mode(
        "OneBit()", compress.OneBit(), lambda order: serial.error_feedback(serial.sign_and_mean, order), plain
    ),
    _mode("SignSGD()", compress.SignSGD(), lambda order: serial.votes, plain),
    _mode(
        "PerHost(TopK(ratio=0.2))",
        compress.PerHost(compress.TopK(ratio=0.2)),
        lambda order: serial.per_host(
            topology().nodes, serial.error_feedback(serial.largest(0.2), order), order
        ),
        hosts=2,
    ),
    _mode("RandomK(ratio=0.2)", compress.RandomK(ratio=0.2), lambda order: random.drawn_elements(0.2, order)),
    _rounded(
        "QSGD(bits=4, segment=10)",
        compress.QSGD(bits=4, segment=10),
        lambda order: random.drawn_codes(random.levels_of(7, 10), order),
    ),
    _rounded(
        "TernGrad()",
        compress.TernGrad(),
        lambda order: random.drawn_codes(random.levels_of(1), order),
        quick=False,
    ),
    _rounded("Natural()", compress.Natural(), random.drawn_powers, quick=False),
    _equal("TopK(ratio=1)", compress.TopK(ratio=1.0)),
    _equal("PowerSGD(rank=12)", compress.PowerSGD(rank=12, min_compression_rate=0.1)),
)
