"""An infinity or a NaN of one rank is one on all ranks, whatever travels; and afterwards training goes on."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import Compression, compress

SHAPES = [(6, 20), (7,), (40,), (3, 4, 5)]
COMPRESSIONS = [
    compress.TopK(0.05),
    compress.TopK(0.05, error_feedback=False),
    compress.RandomK(0.05),
    compress.RandomK(0.05, error_feedback=False),
    compress.Threshold(0.5),
    compress.Threshold(0.5, error_feedback=False),
    compress.DeepGradient(0.05),
    compress.DeepGradient(0.05, nesterov=True, clip_norm=1.0),
    compress.QSGD(2),
    compress.QSGD(4, norm="l2", error_feedback=True),
    compress.QSGD(8, segment=16),
    compress.BlockQuantized(),
    compress.BlockQuantized(bits=8, block=7, error_feedback=True),
    compress.ChunkTopK(keep=1, chunk=16),
    compress.ChunkTopK(keep=3, chunk=20, bits=5, error_decay=0.0),
    compress.Natural(),
    compress.Natural(error_feedback=True),
    compress.TernGrad(),
    compress.TernGrad(clip_sigmas=2.5),
    compress.PowerSGD(1),
    compress.PowerSGD(2, error_feedback=False),
    compress.PowerSGD(1, warmup_steps=2),
    compress.OneBit(),
    compress.OneBit(two_step=True),
    compress.SignSGD(),
    compress.SignSGD(majority_vote=False),
    compress.PerHost(compress.RandomK(0.05)),
    Compression.none,
    Compression.fp16,
    Compression.bf16,
    "adasum",
]


class Steps:
    """Parameters of a dtype, and steps with gradients that differ by rank and step."""

    def __init__(self, compression: object, dtype: torch.dtype) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        chosen = {"op": mpisgd.Adasum} if compression == "adasum" else {"compression": compression}
        self.optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(self.params, lr=0.1), **chosen)

    def reduced(self, step: int, spoil: object = None, unused: int | None = None) -> list[torch.Tensor]:
        """The gradients of a step, flat; `spoil` changes those of this rank before."""
        draw = torch.Generator().manual_seed(50 * mpisgd.rank() + step)
        self.optimizer.zero_grad()
        with self.optimizer.no_sync():
            sum((p * torch.randn(p.shape, generator=draw).to(p.dtype)).sum() for p in self.params).backward()
        if unused is not None:
            self.params[unused].grad = None
        if spoil is not None:
            spoil(self.params)
        self.optimizer.synchronize()
        return [param.grad.flatten() for param in self.params if param.grad is not None]


def spoiling(value: float, which: int):
    """Put a value into one element of a gradient of the last rank, in another place for each parameter."""

    def spoil(params) -> None:
        if mpisgd.rank() == mpisgd.size() - 1:
            params[which].grad.view(-1)[which + 1] = value

    return spoil


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_what_is_not_finite_on_one_rank_is_not_finite_on_any(compression):
    """RandomK did not send it, where its element was not drawn, and a GradScaler stepped."""
    for dtype in (torch.float32, torch.float16):
        training = Steps(compression, dtype)
        training.reduced(0)
        for step, (value, which) in enumerate([(float("inf"), 0), (float("nan"), 1), (float("-inf"), 2)]):
            found = torch.cat(training.reduced(2 * step + 1, spoiling(value, which)))
            everyone(not found.isfinite().all(), f"{dtype}: {value} in parameter {which} has vanished")
            same_on_all_ranks(found.isfinite().all().item())
            after = torch.cat(training.reduced(2 * step + 2))
            everyone(bool(after.isfinite().all()), f"{dtype}: not finite in the step after {value}")
            same_on_all_ranks(after.tolist())


def all_nan(params) -> None:
    if mpisgd.rank() == 0:
        for param in params:
            if param.grad is not None:
                param.grad.fill_(float("nan"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_what_is_kept_recovers_where_a_parameter_had_no_gradient(compression):
    """What arrives for it is kept for the next step: a NaN made that step one of NaN, too."""
    training = Steps(compression, torch.float32)
    training.reduced(0)
    everyone(not torch.cat(training.reduced(1, all_nan, unused=1)).isfinite().all())
    everyone(bool(torch.cat(training.reduced(2)).isfinite().all()))
