"""`context_parallel`: sequences in parts, with other parallelism beside it; equal to one process."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import mpisgd
from mpisgd.core.group import Group
from mpisgd.pipeline import Pipeline
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes.distributed_tensors import joined, local, whole
from mpisgd.tools.verification.modes.synchronous import adam, equal_to_one_process, sgd
from mpisgd.tools.verification.problem import KNOWN, Batch, Problem, drawn
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import MakeOptimizer

__all__ = ["CONTEXTS"]

WIDTH, HEADS, SEQUENCES = 8, 4, 2  # sequences of each rank


class Attention(nn.Module):
    """Causal attention between two layers; its heads are those of the projections that it has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        heads = [
            layer(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


@lru_cache(maxsize=KNOWN)
def sequence_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return a regression on sequences, whose length divides into two chunks for each rank."""

    def batch(step: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        shape = (2, SEQUENCES * size, 4 * size, WIDTH)
        inputs, targets = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        return inputs, targets

    def loss(forward: Any, batch: Batch) -> Tensor:
        inputs, targets = batch
        return mse_loss(forward(inputs), targets)

    def model() -> nn.Module:
        return drawn(nn.Sequential(Attention(dtype), Attention(dtype)), dtype)

    return Problem(model, loss, [batch(step) for step in range(steps)], size)


def _train(
    trainer: Trainer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ring: Any,
    ranks: Sequence[int],
) -> Tensor:
    """Train on parts of the sequences of `ranks` together; return the whole parameters after each step."""
    rows = []
    for step in range(trainer.problem.steps):
        optimizer.zero_grad()
        batch = joined(trainer, step, ranks)
        with mpisgd.context_parallel(ring, buffers=batch, buffer_seq_dims=[1, 1]):
            torch.autograd.backward(trainer.loss(model, batch))
        optimizer.step()
        trainer.end_step([local(param) for param in model.parameters()])
        rows.append(torch.cat([whole(param).detach().flatten() for param in model.parameters()]))
    return torch.stack(rows)


def over_all_ranks(**options: Any) -> Callable[[Trainer], Tensor]:
    """Return the training in which all ranks share all sequences, by the native optimizer."""

    def train(trainer: Trainer) -> Tensor:
        return _natively(trainer, mpisgd.new_group(), range(trainer.problem.size), **options)

    return train


def over_pairs(trainer: Trainer) -> Tensor:
    """Train with two pairs of ranks, each of which has its own sequences."""
    pairs = [mpisgd.new_group([first, first + 1]) for first in (0, 2)]
    ring = pairs[trainer.rank // 2]
    return _natively(trainer, ring, ring.ranks)


def _natively(trainer: Trainer, ring: Group, ranks: Sequence[int], **options: Any) -> Tensor:
    model, group = trainer.problem.model(), trainer.group()
    made = sgd(list(model.parameters()))
    optimizer = mpisgd.DistributedOptimizer(made, model.named_parameters(), group=group, **options)
    return _train(trainer, model, optimizer, ring, ranks)


def with_tensor_parallel(trainer: Trainer) -> Tensor:
    """Train with pairs of ranks that divide heads; both pairs share all sequences, and average."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = trainer.problem.model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    columns = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
    for layer in model.children():
        parallelize_module(layer, mesh["tp"], {**columns, "out": RowwiseParallel()})
    if trainer.sabotage is not Sabotage.NO_COMMUNICATION:  # between the parts
        group = mesh["cp"].get_group()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda param: _average(param, group)
            )
    return _train(trainer, model, sgd(list(model.parameters())), mesh["cp"], range(trainer.problem.size))


def with_pipeline(trainer: Trainer) -> Tensor:
    """Train two pipelines of a layer on each of two stages; the ranks of a stage share all sequences."""
    layers = list(trainer.problem.model().children())
    rings = [mpisgd.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [mpisgd.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    ring, column = rings[trainer.rank // 2], columns[trainer.rank % 2]
    pipeline = Pipeline(
        layers,
        num_micro_batches=2,
        loss=lambda out, targets: trainer.loss(lambda _: out, (out, targets)),
        group=column,
    )
    mine = list(layers[trainer.rank // 2].parameters())
    optimizer = adam(mine)  # with a wrong loss on one rank of two, SGD goes up until nothing is finite
    rows = []
    for step in range(trainer.problem.steps):
        optimizer.zero_grad()
        batch = joined(trainer, step, range(trainer.problem.size))
        with mpisgd.context_parallel(ring, buffers=batch, buffer_seq_dims=[1, 1]):
            pipeline.step(*batch)
        if trainer.sabotage is not Sabotage.NO_COMMUNICATION:  # between the parts
            mpisgd.all_reduce_coalesced([param.grad for param in mine if param.grad is not None], "AVG", ring)
        optimizer.step()
        trainer.end_step(mine)
        flat = torch.cat([param.detach().flatten() for param in mine])
        stages = [torch.empty_like(flat) for _ in range(2)]
        mpisgd.all_gather(stages, flat, column)
        rows.append(torch.cat(stages))
    pipeline.close()
    return torch.stack(rows)


def _average(param: Tensor, group: dist.ProcessGroup) -> None:
    assert param.grad is not None
    dist.all_reduce(local(param.grad), dist.ReduceOp.AVG, group)


def _mode(
    name: str,
    train: Callable[[Trainer], Tensor],
    sizes: tuple[int, int],
    make: MakeOptimizer = sgd,
    **options: Any,
) -> Mode:
    reference = equal_to_one_process(make)
    options = {**options, "problem": sequence_problem, "loads_much": True}
    return Mode(name, "context parallel", train, reference, sizes, **options)


CONTEXTS = (
    _mode("context_parallel", over_all_ranks(), (2, 4)),
    _mode("context_parallel, Sharded(2)", over_all_ranks(strategy=mpisgd.Sharded(2)), (2, 4), quick=False),
    _mode("context_parallel, two pairs", over_pairs, (4, 4), quick=False),
    _mode("context_parallel, pipeline", with_pipeline, (4, 4), adam, quick=False),
    _mode("context_parallel, tensor parallel", with_tensor_parallel, (4, 4), quick=False),
)
