"""Models in bfloat16: the ranks' gradients are added up in float32, and their mean is rounded once.

Such a sum is exact, so neither the order of the ranks nor a transport may change a digit. What one process
makes of the joined batch would differ by the roundings within each gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import mpisgd
from mpisgd.verification.mode import Mode, Reference, flaw_of
from mpisgd.verification.modes.horovod import trained
from mpisgd.verification.modes.synchronous import native, sgd
from mpisgd.verification.modes.torch_programs import ddp
from mpisgd.verification.problem import Problem
from mpisgd.verification.serial.compressors import cast
from mpisgd.verification.serial.training import Combine, one_model
from mpisgd.verification.trainee import Trainee

__all__ = ["BFLOAT16"]

FAMILY = "models in bfloat16"


def rounded(combine: Combine) -> Callable[[Problem], Reference]:
    """Return the reference of a sum that is exact."""

    def reference(problem: Problem) -> Reference:
        expected = one_model(problem, sgd, combine)
        return Reference(expected, 0.0, "bit for bit: sums in float32 are exact", flaw_of(expected))

    return reference


def divided_first(ranks: list[list[Tensor]]) -> list[Tensor]:
    """DDP divides each rank's gradients before the sum, and so rounds twice."""
    shares = [[grad / len(ranks) for grad in grads] for grads in ranks]
    sums = (torch.stack([part.float() for part in parts]).sum(0) for parts in zip(*shares, strict=True))
    return [total.to(torch.bfloat16) for total in sums]


def _mode(
    name: str, train: Callable[[Trainee], Tensor], combine: Combine | None = None, *, quick: bool = False
) -> Mode:
    reference = rounded(combine or cast(torch.bfloat16, 1))
    return Mode(name, FAMILY, train, reference, dtypes=(torch.bfloat16,), quick=quick)


BFLOAT16 = (
    _mode("bfloat16", native(sgd), quick=True),
    _mode("bfloat16, small buckets", native(sgd, overlap=True, bucket_cap_bytes=256)),
    _mode("bfloat16, shared parameters", native(sgd, share_parameters=True)),
    _mode("bfloat16, Sharded(stage=2)", native(sgd, strategy=mpisgd.Sharded(2))),
    _mode("bfloat16, DistributedDataParallel", ddp, divided_first),
    _mode("bfloat16, hvd", trained()),
)
