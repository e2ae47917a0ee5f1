"""`mpisgd.layout`: named dimensions divided along 1, 2 and 3 axes of ranks; equal to one process."""

from collections.abc import Callable

from torch import Tensor

import mpisgd
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes.distributed_tensors import joined, train_distributed
from mpisgd.tools.verification.modes.synchronous import equal_to_one_process, sgd
from mpisgd.tools.verification.problem import Batch
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer

__all__ = ["LAYOUTS"]

NAMES = {
    "0.weight": ("first", "in"),
    "0.bias": ("first",),
    "1": ("batch", "first"),
    "2.weight": ("second", "first"),
    "2.bias": ("second",),
    "3": ("batch", "second"),
    "4.weight": ("out", "second"),
    "4.bias": ("out",),
}


def laid_out(rules: str, mesh: str) -> Callable[[Trainer], Tensor]:
    """Return the training in a layout, in which all ranks have the joined batch.

    Without communication each rank has the whole model, and its own share of the batch.
    """

    def train(trainer: Trainer) -> Tensor:
        model = trainer.problem.model()
        if trainer.sabotage is Sabotage.NO_COMMUNICATION:
            return train_distributed(trainer, model, trainer.batch)
        layout = mpisgd.layout(rules, mesh=mesh.format(size=trainer.problem.size))
        layout.distribute(model, NAMES, inputs=("batch", "in"), outputs=("batch", "out"))
        everyone = range(trainer.problem.size)

        def batch(step: int) -> Batch:
            inputs, targets = joined(trainer, step, everyone)
            return inputs, layout.shard(targets, ("batch", "out"))

        return train_distributed(trainer, model, batch)

    return train


def _mode(rules: str, mesh: str, sizes: tuple[int, int], *, quick: bool = False) -> Mode:
    axes = mesh.count(":")
    name = f"layout in {axes}-D: {rules}"
    train, reference = laid_out(rules, mesh), equal_to_one_process(sgd)
    return Mode(name, "layouts", train, reference, sizes, quick=quick, loads_much=True)


LAYOUTS = (
    _mode("batch:a", "a:{size}", (2, 4)),
    _mode("first:a", "a:{size}", (2, 4), quick=True),
    _mode("batch:a; first:b", "a:2, b:2", (4, 4), quick=True),
    _mode("first:a; second:b", "a:2, b:2", (4, 4)),
    _mode("batch:a; first:b; second:c", "a:2, b:2, c:2", (8, 8)),
)
