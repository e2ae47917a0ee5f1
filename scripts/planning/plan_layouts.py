"""Trainings of a GPT in layouts, for `validate_plan.py`: what `train_text.py` does, step by step."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from training.layout import Layout
from training.parallelize import parallelize, split_layers
from training.text_model import VOCABULARY, ModelSize, build_model
from training.training_pass import Pass, Pipelined, Scheduled, ScheduleName, Whole

import mpisgd
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.models.gpt import gpt
from mpisgd.tools.plan.models.model import Model
from mpisgd.tools.plan.steps.parallel import Parallel

SIZE = ModelSize(num_layers=8, num_heads=8, dim=256, context=128)
EXAMPLES = 4  # of a rank
ONE_EXAMPLE, DIVIDED = "one example", "divided over one rank"
LAYOUTS = (
    "Parallel(pp=2)",
    "Parallel(pp=2, schedule='gpipe')",
    "Parallel(pp=2, micro_batches=2)",
    "Parallel(tp=2)",
    "Parallel(tp=2, pp=2)",
    "Parallel(pp=4)",
)
make_optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def text_sizes() -> Model:
    """The same model as the plan has it."""
    return gpt(SIZE.num_layers, SIZE.num_heads, SIZE.dim, SIZE.context, VOCABULARY)


class TextTraining:
    """Steps on a fixed batch.

    Args:
        model_pass: forward and backward.
        optimizer: of this rank's part; None: the pass has it.
        sequences: the examples, those of all ranks or this rank's share.
    """

    def __init__(self, model_pass: Pass, optimizer: torch.optim.Optimizer | None, sequences: Tensor) -> None:
        self._pass, self._optimizer = model_pass, optimizer
        self._inputs, self._targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def step(self) -> None:
        """Take one step."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._pass.backward(self._inputs, self._targets)
        if self._optimizer is not None:
            self._optimizer.step()


def own_trainings() -> dict[str, TextTraining]:
    """What a rank does by itself: all its examples, one of them, and all with blocks divided over itself.

    The second tells what does not depend on the number of examples, the third what dividing takes.
    """
    generator = torch.Generator().manual_seed(1 + mpisgd.rank())
    sequences = torch.randint(VOCABULARY, (EXAMPLES, SIZE.context + 1), generator=generator)
    mesh = init_device_mesh("cpu", (mpisgd.size(), 1), mesh_dim_names=("ranks", "tp"))
    found = {}
    for name, share in (("none", sequences), (ONE_EXAMPLE, sequences[:1]), (DIVIDED, sequences)):
        model = build_model(SIZE, 0)
        if name == DIVIDED:
            split_layers(model, mesh["tp"])
        found[name] = TextTraining(Whole(model, 1), make_optimizer(model.parameters()), share)
    return found


def text_trainings() -> tuple[TextTraining, dict[str, TextTraining]]:
    """A rank's own training, and those of all ranks together by the method's text. Collective."""
    dist.init_process_group("mpisgd")
    generator = torch.Generator().manual_seed(0)
    size = mpisgd.size()
    batch = torch.randint(VOCABULARY, (EXAMPLES * size, SIZE.context + 1), generator=generator)
    share = batch[mpisgd.rank() * EXAMPLES :][:EXAMPLES]
    found = own_trainings()
    alone = found.pop("none")
    if size > 1:
        model = build_model(SIZE, 0)
        together = mpisgd.DistributedOptimizer(make_optimizer(model.parameters()))
        found["Synchronous"] = TextTraining(Whole(model, 1), together, share)
    for method in planned_methods(";".join(LAYOUTS)):
        ranks = method.strategy.tp * method.strategy.pp
        if size > 1 and size % ranks == 0:
            found[method.name] = divided(method.strategy, size // ranks, batch)
    return alone, found


def divided(parallel: Parallel, dp: int, batch: Tensor) -> TextTraining:
    """A training in a layout: stages of mpisgd.pipeline, or torch's own where there is tp. Collective."""
    layout = Layout(dp=dp, tp=parallel.tp, pp=parallel.pp, zero=0)
    number = parallel.micro_batches_of(len(batch) / dp)
    whole = build_model(SIZE, 0)
    if parallel.tp == 1:
        schedule = ScheduleName(parallel.schedule)
        return TextTraining(
            Scheduled(whole, layout, schedule, number, make_optimizer, recompute=False), None, batch
        )
    mesh = layout.mesh()
    model = parallelize(whole, layout, mesh)
    place = mesh.get_local_rank("replicate")
    share = batch[place * len(batch) // dp :][: len(batch) // dp]
    model_pass = Pipelined(model, number, mesh.get_group("pp")) if parallel.pp > 1 else Whole(model, number)
    return TextTraining(model_pass, make_optimizer(model.parameters()), share)
