"""`mpisgd.SyncBatchNorm` in torch's DistributedDataParallel: as one process on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from verdicts import everyone

from mpisgd import InvalidArgument, SyncBatchNorm

STEPS, IMAGES = 5, 12  # 1, 2, 3 and 4 ranks divide it


def step(model: nn.Module, opt: torch.optim.Optimizer, images: torch.Tensor) -> None:
    opt.zero_grad()
    model(images).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("own", [False, True], ids=["group of the gradients", "group of its own"])
def test_ddp_equals_one_process(own):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    process_group = dist.new_group() if own else None
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), process_group)
    model = DistributedDataParallel(ours)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9) for net in (plain, ours)]
    worst = 0.0
    for number in range(STEPS):
        draw = torch.Generator().manual_seed(number)
        images = torch.randn(IMAGES, 1, 6, 6, generator=draw, dtype=torch.float64) * 3 + 1
        step(plain, optimizers[0], images)
        step(model, optimizers[1], images.chunk(dist.get_world_size())[dist.get_rank()])
        pairs = zip(plain.state_dict().values(), ours.state_dict().values(), strict=True)
        worst = max(worst, *((a.double() - b.double()).abs().max().item() for a, b in pairs))
    everyone(worst < 1e-11, f"off by {worst}")
    if process_group is not None:
        dist.destroy_process_group(process_group)


def test_a_group_of_the_backend_stands_for_ours():
    norm = SyncBatchNorm(2, process_group=dist.group.WORLD)
    everyone(norm.process_group is dist.group.WORLD.mpisgd_group)


def test_a_group_of_another_backend_is_refused():
    with pytest.raises(InvalidArgument, match="process_group is a ProcessGroup; expected what"):
        SyncBatchNorm(2, process_group=dist.ProcessGroup(0, 1))
