"""`mpisgd.horovod`: Horovod's optimizer with its options."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.methods.adasum.paper import Adasum
from mpisgd.methods.cast.paper import Cast
from mpisgd.tools.verification.mode import TURNED, Mode, Reference, between_orders
from mpisgd.tools.verification.modes.synchronous import equal_to_one_process, sgd
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.problem import HIDDEN, Problem, normalized_problem
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import trajectory

__all__ = ["HOROVOD"]

FAMILY = "Horovod's interface"
Options = Callable[[Any], dict[str, Any]]  # of the module `mpisgd.horovod`, which is imported late


def trained(
    options: Options = lambda hvd: {}, *, parts: int = 1, is_sum: bool = False, normalized: bool = False
) -> Callable[[Trainer], Tensor]:
    """Return the training by Horovod's optimizer.

    Args:
        options: further arguments of the optimizer.
        parts: backward passes per step.
        is_sum: divide losses by the number of ranks, since gradients are added.
        normalized: use Horovod's SyncBatchNorm.
    """

    def train(trainer: Trainer) -> Tensor:
        import mpisgd.horovod as hvd

        hvd.init()
        model = trainer.problem.model()
        if normalized:
            assert isinstance(model, nn.Sequential)
            model[1] = hvd.SyncBatchNorm(HIDDEN).to(trainer.problem.dtype)
        alone = trainer.sabotage is Sabotage.NO_COMMUNICATION
        sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if alone else []
        optimizer = hvd.DistributedOptimizer(
            sgd(list(model.parameters())),
            named_parameters=model.named_parameters(),
            process_set=sets[trainer.rank] if sets else hvd.global_process_set,
            backward_passes_per_step=parts,
            **options(hvd),
        )
        divisor = trainer.problem.size if is_sum else 1
        rows = trainer.train(
            model, optimizer, backward=lambda loss: torch.autograd.backward(loss / divisor), parts=parts
        )
        for process_set in sets:
            hvd.remove_process_set(process_set)
        return torch.stack(rows)

    return train


def half(problem: Problem, order: int) -> Tensor:
    """Train one model with gradients that travel as float16."""
    return trajectory(problem, sgd, Definition(Cast(torch.float16)), order)


def adaptive(problem: Problem, _: int) -> Tensor:
    """Let ranks step by themselves, and combine the steps; pairs have one order."""
    return trajectory(problem, sgd, Definition(Adasum(of_steps=True)))


def _equal(name: str, train: Callable[[Trainer], Tensor], **options: Any) -> Mode:
    return Mode(f"hvd: {name}", FAMILY, train, equal_to_one_process(sgd), **options)


def _defined(
    name: str, train: Callable[[Trainer], Tensor], reference: Callable[[Problem], Reference], **options: Any
) -> Mode:
    return Mode(f"hvd: {name}", FAMILY, train, reference, (2, 2**31), **options)


HOROVOD = (
    _equal("DistributedOptimizer", trained()),
    _equal(
        "two passes, groups=2, gradient_predivide_factor",
        trained(lambda hvd: {"groups": 2, "gradient_predivide_factor": 2.0}, parts=2),
    ),
    _equal("op=Sum", trained(lambda hvd: {"op": hvd.Sum}, is_sum=True), quick=False),
    _equal(
        "SyncBatchNorm", trained(normalized=True), sizes=(2, 2**31), problem=normalized_problem, quick=False
    ),
    _defined(
        "Compression.fp16",
        trained(lambda hvd: {"compression": hvd.Compression.fp16}),
        between_orders(half),
        quick=False,
    ),
    _defined("op=Adasum", trained(lambda hvd: {"op": hvd.Adasum}), between_orders(adaptive, TURNED)),
)
