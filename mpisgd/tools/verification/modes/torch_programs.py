"""torch's own data, sharded, tensor and pipeline parallelism over the backend "mpisgd"."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpisgd
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes.distributed_tensors import joined, local, train_distributed, whole
from mpisgd.tools.verification.modes.synchronous import adam, equal_to_one_process, sgd
from mpisgd.tools.verification.problem import Batch, normalized_problem
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import MakeOptimizer
from mpisgd.transport.messages.link import even_ranges

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["TORCH_PROGRAMS"]


def ddp(trainer: Trainer) -> Tensor:
    """Train with DistributedDataParallel."""
    model = trainer.problem.model()
    wrapped = DistributedDataParallel(model, process_group=trainer.process_group())
    return torch.stack(trainer.train(model, sgd(list(model.parameters())), forward=wrapped))


def synchronized_norm(trainer: Trainer) -> Tensor:
    """Train with batch normalization over the examples of all ranks, by the native optimizer."""
    model, group = trainer.problem.model(), trainer.group()
    model = mpisgd.SyncBatchNorm.convert_sync_batchnorm(model, group)
    optimizer = mpisgd.DistributedOptimizer(
        sgd(list(model.parameters())), model.named_parameters(), group=group
    )
    return torch.stack(trainer.train(model, optimizer))


def zero_redundancy(trainer: Trainer) -> Tensor:
    """Train with DDP and torch's ZeroRedundancyOptimizer (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, group = trainer.problem.model(), trainer.process_group()
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01, eps=1e-4
    )
    return torch.stack(trainer.train(model, optimizer, forward=wrapped))


def fully_sharded(trainer: Trainer) -> Tensor:
    """Train with FSDP2 (ZeRO-3)."""
    from torch.distributed.device_mesh import DeviceMesh

    group = trainer.process_group()
    return _sharded(
        trainer, _layers(trainer), _mesh() if group is None else DeviceMesh.from_group(group, "cpu")
    )


def sharded_and_tensor_parallel(trainer: Trainer) -> Tensor:
    """Train with FSDP2 over two pairs of ranks that divide the hidden layer: every pair has its share."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _layers(trainer)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    first = trainer.rank // 2 * 2

    def batch(step: int) -> Batch:
        return joined(trainer, step, (first, first + 1))

    if trainer.sabotage is Sabotage.NO_COMMUNICATION:  # between the pairs
        return train_distributed(trainer, model, batch)
    return _sharded(trainer, model, mesh["dp"], batch)


def _sharded(
    trainer: Trainer, model: nn.Sequential, mesh: "DeviceMesh", batch: Callable[[int], Batch] | None = None
) -> Tensor:
    _shard(model, mesh)
    return train_distributed(trainer, model, batch or trainer.batch)


def _shard(model: nn.Module, mesh: "DeviceMesh") -> None:
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(trainer: Trainer) -> Tensor:
    """Train with the hidden layer divided by columns and rows; every rank has the joined batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _layers(trainer)
    if trainer.sabotage is Sabotage.NO_COMMUNICATION:  # the part that a rank would have, and no sum
        model[2].register_forward_pre_hook(_keep_own_columns(trainer))
    else:
        parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    everyone = range(trainer.problem.size)
    return train_distributed(trainer, model, lambda step: joined(trainer, step, everyone))


def three_ways(trainer: Trainer) -> Tensor:
    """Train a pipeline of two stages, each sharded over two ranks (FSDP2) of pairs that divide its layers."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    axes = ("pp", "dp", "tp")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
    stage, half, _ = (mesh.get_local_rank(axis) for axis in axes)
    mine = _layers(trainer)[3 * stage : 3 * stage + 3 - stage]
    first: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    second: dict[str, ParallelStyle] = {"4": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(mine, mesh["tp"], (first, second)[stage])
    if trainer.sabotage is not Sabotage.NO_COMMUNICATION:  # between the halves of the batch
        _shard(mine, mesh["dp"])
    ranks = range(half * 4, half * 4 + 4)
    return _train_stage(
        trainer, mine, stage, 2, mesh["pp"].get_group(), lambda step: joined(trainer, step, ranks)
    )


def pipeline(trainer: Trainer) -> Tensor:
    """Train a stage on each rank, by torch's GPipe schedule; every micro-batch is a rank's share.

    Without communication each rank trains all layers, with the micro-batch that is its share.
    """
    problem, group = trainer.problem, trainer.process_group()
    stages, stage = (problem.size, trainer.rank) if group is None else (1, 0)
    layers = _layers(trainer)
    first, last = even_ranges(len(layers), stages)[stage]
    mine = layers[first:last]
    ranks = range(problem.size) if group is None else [trainer.rank]
    return _train_stage(trainer, mine, stage, stages, group, lambda step: joined(trainer, step, ranks))


def _train_stage(
    trainer: Trainer,
    mine: nn.Module,
    stage: int,
    stages: int,
    group: dist.ProcessGroup | None,
    batch: Callable[[int], Batch],
) -> Tensor:
    """Train this rank's stage, with as many micro-batches as there are stages; return all parameters."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # loads the compiler

    schedule = ScheduleGPipe(
        PipelineStage(mine, stage, stages, torch.device("cpu"), group=group),
        stages,
        loss_fn=lambda out, target: trainer.loss(lambda _: out, (out, target)),
    )
    optimizer = sgd(list(mine.parameters()))
    rows = []
    for step in range(trainer.problem.steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        schedule.step(*([inputs] if stage == 0 else []), target=targets if stage == stages - 1 else None)
        optimizer.step()
        trainer.end_step([local(param) for param in mine.parameters()])
        rows.append(_of_all_stages(mine, group))
    return torch.stack(rows)


def _of_all_stages(stage: nn.Module, group: dist.ProcessGroup | None) -> Tensor:
    params = [whole(param).detach() for param in stage.parameters()]
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, params, group)
    return torch.cat([param.flatten() for params in stages for param in params])


def _layers(trainer: Trainer) -> nn.Sequential:
    model = trainer.problem.model()
    assert isinstance(model, nn.Sequential)
    return model


def _keep_own_columns(trainer: Trainer) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = args
        count = hidden.shape[1] // trainer.problem.size
        mask = torch.zeros(hidden.shape[1], dtype=hidden.dtype)
        mask[trainer.rank * count : (trainer.rank + 1) * count] = 1
        return (hidden * mask,)

    return keep


def _mesh() -> "DeviceMesh":
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def _mode(name: str, train: Callable[[Trainer], Tensor], make: MakeOptimizer = sgd, **options: Any) -> Mode:
    return Mode(name, "torch over MPI", train, equal_to_one_process(make), **options)


TORCH_PROGRAMS = (
    _mode("DistributedDataParallel", ddp, loads_much=True),
    _mode("ZeroRedundancyOptimizer", zero_redundancy, adam, quick=False, loads_much=True),
    _mode("FSDP2", fully_sharded, loads_much=True),
    _mode("tensor parallel", tensor_parallel, sizes=(2, 4), quick=False, loads_much=True),
    _mode(
        "FSDP2 and tensor parallel",
        sharded_and_tensor_parallel,
        sizes=(4, 4),
        quick=False,
        loads_much=True,
    ),
    _mode("pipeline", pipeline, sizes=(2, 3), quick=False, loads_much=True),
    _mode("pipeline, FSDP2 and tensor parallel", three_ways, sizes=(8, 8), quick=False, loads_much=True),
    _mode("SyncBatchNorm", synchronized_norm, sizes=(2, 2**31), problem=normalized_problem),
)
