"""Training steps with torch's own DDP and FSDP2, on whatever backend the default process group has."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpisgd.torch_backend  # makes the backend known where the package is not installed
from mpisgd.tools.bench.measure import Timed, Unavailable
from mpisgd.tools.bench.training import MIB, StepTask, Training

__all__ = ["group_on_mpisgd", "torch_step"]

# Smaller modules are left to what contains them: each unit costs two collectives.
SHARD_NUMEL = 100_000


@contextlib.contextmanager
def group_on_mpisgd(wanted: bool) -> Iterator[str]:
    """Have the default process group on mpisgd in here; yield why there is none, "" where there is one.

    Collective. Where something fails inside, the group stays: its end would wait for the other ranks.
    """
    reason = "" if wanted else "not asked for"
    if wanted:
        try:
            dist.init_process_group("mpisgd")
        except mpisgd.UnsupportedTorch as exc:
            reason = str(exc)
    yield reason
    if not reason:
        dist.destroy_process_group()


def torch_step(name: str, task: StepTask, *, ours: bool = False) -> Timed:
    """Return the step that `task` describes: with FSDP2, DDP, or no communication.

    Raises:
        Unavailable: this torch has no FSDP2.
    """
    training = Training(task, dist.get_rank())
    if task.sharded:
        _shard(training)
    elif task.communicates:
        training.forward = DistributedDataParallel(
            training.model, gradient_as_bucket_view=True, bucket_cap_mb=task.bucket_bytes / MIB
        )
    return Timed(name, training.step, training, start=dist.barrier, ours=ours)


def _shard(training: Training) -> None:
    """Shard a model by its larger layers, and give it an optimizer of what is left of its parameters."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as exc:
        raise Unavailable(f"torch {torch.__version__} has no FSDP2") from exc
    # The models return views, which nobody here writes to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in _layers(training.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(training.model, mesh=mesh)
    training.optimizer = training.task.make_optimizer(training.model)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that are worth sharding, without the small ones."""
    rows = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    layers = [layer for row in rows for layer in row]
    return [layer for layer in layers if sum(param.numel() for param in layer.parameters()) >= SHARD_NUMEL]
