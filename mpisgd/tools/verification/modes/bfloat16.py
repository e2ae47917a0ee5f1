"""Models in bfloat16: the ranks' gradients are added up in float32, and their mean is rounded once.

Such a sum is exact, so neither the order of the ranks nor a transport may change a digit. What one process
makes of the joined batch would differ by the roundings within each gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import mpisgd
from mpisgd.methods.paper_kit import Paper, Vec, World, filled, total
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.mode import Mode, Reference, flaw_of
from mpisgd.tools.verification.modes.horovod import trained
from mpisgd.tools.verification.modes.synchronous import native, sgd
from mpisgd.tools.verification.modes.torch_programs import ddp
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.problem import Problem
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import trajectory

__all__ = ["BFLOAT16"]

FAMILY = "models in bfloat16"


def rounded(paper: Paper[None]) -> Callable[[Problem], Reference]:
    """Return the reference of a sum that is exact."""

    def reference(problem: Problem) -> Reference:
        expected = trajectory(problem, sgd, Definition(paper))
        return Reference(expected, 0.0, "bit for bit: sums in float32 are exact", flaw_of(expected))

    return reference


class DividedFirst(Synchronous):
    """DDP divides each rank's gradients before the sum, and so rounds twice."""

    def reduce(self, s: None, g: dict[int, Vec], w: World) -> tuple[None, dict[int, Vec]]:
        """See `Paper`."""
        shares = {i: g_i / len(w.ranks) for i, g_i in filled(g).items()}
        return None, dict.fromkeys(w.ranks, total(shares, w))


def _mode(
    name: str, train: Callable[[Trainer], Tensor], paper: Paper[None] | None = None, *, quick: bool = False
) -> Mode:
    reference = rounded(paper or Synchronous())
    return Mode(name, FAMILY, train, reference, dtypes=(torch.bfloat16,), quick=quick)


BFLOAT16 = (
    _mode("bfloat16", native(sgd), quick=True),
    _mode("bfloat16, small buckets", native(sgd, overlap=True, bucket_cap_bytes=256)),
    _mode("bfloat16, shared parameters", native(sgd, share_parameters=True)),
    _mode("bfloat16, Sharded(stage=2)", native(sgd, strategy=mpisgd.Sharded(2))),
    _mode("bfloat16, DistributedDataParallel", ddp, DividedFirst()),
    _mode("bfloat16, hvd", trained()),
)
