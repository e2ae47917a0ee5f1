"""Data, tensor and pipeline parallelism together, on one DeviceMesh: a transformer as in one process.

The pipeline's mesh always has all three axes; with four ranks one of them is of length one.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from chains import run_step
from closeness import check_close, gradients, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from transformer import Block, cross_entropy, joined_batch, spread, transformer
from verdicts import everyone

import mpisgd

pytestmark = [
    pytest.mark.mpi(min_size=4),
    # It warns of changing a stage's output in place, which nobody does.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

LIMIT = 5e-14
STEPS = 2
AXES = ("pp", "dp", "tp")
GRIDS = {"pp x tp": (2, 1, 2), "pp x dp": (2, 2, 1), "pp x dp x tp": (2, 2, 2)}


@pytest.fixture(scope="module")
def meshes(default_group) -> dict[str, DeviceMesh]:
    fitting = {name: grid for name, grid in GRIDS.items() if math.prod(grid) == mpisgd.size()}
    return {name: init_device_mesh("cpu", grid, mesh_dim_names=AXES) for name, grid in fitting.items()}


@pytest.fixture(params=GRIDS)
def mesh(request, meshes) -> DeviceMesh:
    if request.param not in meshes:
        pytest.skip("for another number of ranks")
    return meshes[request.param]


def stage_of(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """This rank's slice: the embedding and the first block, or the rest."""
    return (model[:2], model[2:])[mesh.get_local_rank("pp")]


def sharded(stage: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in stage:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


def replicated(stage: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    # Without find_unused_parameters torch 2.13 fails in the second step of a pipeline's first stage, on gloo
    # too: "rebuilt parameter indices size is not same as original model parameters size".
    group = mesh["dp"].get_group()
    return DistributedDataParallel(stage, process_group=group, find_unused_parameters=True)


class Run:
    """One rank's part of a distributed run: a slice of the layers, of every layer, and of the batch."""

    def __init__(self, mesh: DeviceMesh, over_dp, schedule: type, num_micro_batches: int) -> None:
        self.mesh = mesh
        self.part = stage_of(transformer(blocks=2), mesh)
        if mesh["tp"].size() > 1:
            spread(self.part, mesh["tp"])
        module = over_dp(self.part, mesh) if mesh["dp"].size() > 1 else self.part
        where, stages, group = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh["pp"].get_group()
        self.stage = PipelineStage(module, where, stages, torch.device("cpu"), group=group)
        self.schedule = schedule(self.stage, num_micro_batches, loss_fn=cross_entropy)
        self.opt = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(self, step: int) -> list[Tensor]:
        """The loss over the joined batch, on the ranks that learn of it."""
        self.opt.zero_grad()
        rows = [t.chunk(self.mesh["dp"].size())[self.mesh.get_local_rank("dp")] for t in joined_batch(step)]
        _, losses = run_step(self.schedule, [self.stage], *rows)
        self.opt.step()
        if not losses:
            return []
        loss = torch.stack(losses).mean().detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=self.mesh["dp"].get_group())
        return [loss]


class OneProcess:
    def __init__(self) -> None:
        self.model = transformer(blocks=2)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, step: int) -> Tensor:
        self.opt.zero_grad()
        tokens, targets = joined_batch(step)
        loss = cross_entropy(self.model(tokens), targets)
        loss.backward()
        self.opt.step()
        return loss


def check_close_models(ours: nn.Module, plain: nn.Module) -> None:
    check_close(gradients(ours), gradients(plain), LIMIT)
    check_close(ours.parameters(), plain.parameters(), LIMIT)


def check_equal_to_one_process(ours: Run) -> None:
    plain = OneProcess()
    part = stage_of(plain.model, ours.mesh)
    for step in range(STEPS):
        seen, expected = ours.step(step), plain.step(step)
        check_close(seen, [expected] * len(seen), LIMIT)
        check_close_models(ours.part, part)


def test_sharded_and_tensor_parallel_equals_one_process(default_group):
    size = mpisgd.size()
    if size % 2:
        pytest.skip("an odd number of ranks makes no grid")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    ours, plain = OneProcess(), OneProcess()
    sharded(spread(ours.model, mesh["tp"], split_logits=True), mesh)
    ours.opt = torch.optim.SGD(ours.model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        tokens, targets = (t.chunk(2)[mesh.get_local_rank("dp")] for t in joined_batch(step))
        ours.opt.zero_grad()
        with loss_parallel():
            loss = cross_entropy(ours.model(tokens), targets)
            loss.backward()
        ours.opt.step()
        loss = whole(loss)
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        check_close([loss], [plain.step(step)], LIMIT)
        check_close_models(ours.model, plain.model)


def test_sharded_over_dp_equals_one_process(mesh):
    check_equal_to_one_process(Run(mesh, sharded, Schedule1F1B, 3))


def test_replicated_over_dp_equals_one_process(meshes):
    if "pp x dp" not in meshes:
        pytest.skip("DDP knows nothing of the distributed tensors of tensor parallelism")
    check_equal_to_one_process(Run(meshes["pp x dp"], replicated, ScheduleGPipe, 2))


def test_every_axis_has_the_ranks_that_differ_in_it_alone(mesh):
    ranks = mesh.mesh
    at = dict(zip(AXES, mesh.get_coordinate(), strict=True))
    for axis in AXES:
        index = tuple(slice(None) if name == axis else at[name] for name in AXES)
        group = mesh[axis].get_group()
        everyone(dist.get_process_group_ranks(group) == ranks[index].tolist(), axis)
        total = torch.tensor([float(mpisgd.rank())])
        dist.all_reduce(total, group=group)
        everyone(total.item() == ranks[index].sum().item(), f"{axis}: {total.item()}")
