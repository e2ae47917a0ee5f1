"""A group of ours beside a main group of another backend, as beside NCCL: objects, checkpoints of its state.

The main group is gloo's here, which trains; all that DCP says goes over ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from joined import STEPS, adamw, agree, full_state, net, of_rank, train
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from verdicts import everyone, referee

from mpisgd.torch_backend import ProcessGroupMpisgd


@pytest.fixture(scope="module", autouse=True)
def main_group(default_group: None) -> Iterator[dist.ProcessGroup]:
    """gloo's, in the place of the default group: what names no group goes by it."""
    ours, main = dist.group.WORLD, dist.new_group(backend="gloo")
    c10d._update_default_pg(main)
    yield main
    c10d._update_default_pg(ours)
    dist.destroy_process_group(main)


@pytest.fixture(scope="module")
def control(main_group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="mpisgd")
    yield group
    dist.destroy_process_group(group)


@pytest.fixture(scope="module")
def fewer(main_group: dist.ProcessGroup) -> Iterator[list[dist.ProcessGroup]]:
    """The same two groups of half of the ranks; none on the others."""
    ranks = list(range((dist.get_world_size() + 1) // 2))
    groups = [dist.new_group(ranks, backend=backend) for backend in ("gloo", "mpisgd")]
    groups = groups if dist.get_rank() in ranks else []
    yield groups
    for group in groups:
        dist.destroy_process_group(group)


class Training:
    """FSDP2 over a group of gloo."""

    def __init__(self, group: dist.ProcessGroup, seed: int = 0) -> None:
        self.group = group
        # torch keeps meshes, and takes equal ones for one: by its name none of other tests is taken for it.
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("over gloo",))
        self.model: Any = fully_shard(net(seed), mesh=mesh)
        self.optimizer = adamw(self.model)
        assert isinstance(self.model, FSDPModule)

    def train(self, *steps: int) -> None:
        rows = of_rank(self.group.rank(), self.group.size())
        train(self.model, self.optimizer, rows, steps=steps)

    def state(self) -> dict[str, Any]:
        """Of this rank's shards: what DCP saves, and loads into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path, control: dist.ProcessGroup) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=control)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def whole(self) -> dict[str, Any]:
        return full_state(self.model, self.optimizer)


@pytest.mark.parametrize("backend", ["mpisgd", "cpu:mpisgd,cuda:nccl"])
def test_objects_and_tensors_go_by_a_group_of_ours(backend: str) -> None:
    group = dist.new_group(backend=backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {"rank": rank, "plan": list(range(rank, rank + 3))}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own, group=group)
    at_last = [None] * size if rank == size - 1 else None
    dist.gather_object(own, at_last, dst=size - 1, group=group)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [{"for": to} for to in range(size)] if rank == 0 else None, 0, group)
    told: list[Any] = [own if rank == size - 1 else None]
    dist.broadcast_object_list(told, src=size - 1, group=group)
    dist.all_reduce(total := torch.arange(5.0) + rank, group=group)
    dist.all_reduce(by_main := torch.arange(5.0) + rank)
    every = [{"rank": other, "plan": list(range(other, other + 3))} for other in range(size)]
    everyone(isinstance(group, ProcessGroupMpisgd) and dist.get_backend() == "gloo")
    everyone(gathered == every and at_last in (None, every), f"{gathered}, {at_last}")
    everyone(part == [{"for": rank}] and told == [every[-1]], f"{part}, {told}")
    expected = size * torch.arange(5.0) + size * (size - 1) / 2
    everyone(torch.equal(total, expected) and torch.equal(by_main, expected))
    dist.destroy_process_group(group)


def test_the_state_at_the_call_is_saved_and_fewer_ranks_load_it(
    folder: Path,
    main_group: dist.ProcessGroup,
    control: dist.ProcessGroup,
    fewer: list[dist.ProcessGroup],
) -> None:
    """Training goes on over gloo, and changes the parameters, before the saving thread is done."""
    run, more = Training(main_group), range(STEPS, STEPS + 5)
    run.train(*range(STEPS))
    at_call = run.whole()
    saving = dcp.async_save(run.state(), checkpoint_id=folder / "at call", process_group=control)
    run.train(*more)
    saving.result(timeout=30)
    later = run.whole()
    moved = all(not torch.equal(later["model"][name], value) for name, value in at_call["model"].items())
    everyone(moved, "training has changed nothing")
    dcp.save(run.state(), checkpoint_id=folder / "later", process_group=control)

    again = Training(main_group, seed=1)
    again.load(folder / "at call", control)
    agree(again.whole(), at_call, 0.0)
    again.train(*more)
    agree(again.whole(), later, 0.0)
    loaded = later
    if fewer:
        few = Training(fewer[0], seed=2)
        few.load(folder / "later", fewer[1])
        loaded = few.whole()
    agree(loaded, later, 0.0)


class FailsAt(dcp.FileSystemWriter):
    """One rank cannot do one step of saving."""

    def __init__(self, folder: Path, step: str, rank: int) -> None:
        super().__init__(folder)
        self.step = step if dist.get_rank() == rank else ""

    def prepare_local_plan(self, plan: Any) -> Any:
        self.fail_at("plan")
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.fail_at("write")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.fail_at("finish")
        super().finish(metadata, results)

    def fail_at(self, step: str) -> None:
        if step == self.step:
            raise OSError(f"no space left for {step}")


@pytest.mark.parametrize("meanwhile", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize(("step", "rank"), [("plan", -1), ("write", -1), ("finish", 0)])
def test_every_rank_learns_which_one_could_not_save_and_why(
    step: str, rank: int, meanwhile: bool, folder: Path, control: dist.ProcessGroup
) -> None:
    rank %= dist.get_world_size()
    state, said = {"x": torch.arange(6.0) + dist.get_rank()}, "nothing"
    writer = FailsAt(folder, step, rank)
    try:
        if meanwhile:
            dcp.async_save(state, storage_writer=writer, process_group=control).result(timeout=30)
        else:
            dcp.save(state, storage_writer=writer, process_group=control)
    except CheckpointException as exc:
        said = str(exc)
    everyone(f"(RANK {rank})" in said and f"OSError: no space left for {step}" in said, said)
    everyone(not (folder / ".metadata").exists(), "a checkpoint that is not whole looks whole")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank(), group=control)
    everyone(ranks == list(range(len(ranks))), f"{ranks}")
    referee().barrier()
