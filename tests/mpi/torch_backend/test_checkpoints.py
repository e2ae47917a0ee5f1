"""torch.distributed.checkpoint on our groups: what some ranks have saved, others load."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from joined import STEPS, adamw, agree, full_state, net, of_rank, train
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from verdicts import everyone, referee

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]


class Run:
    """A model and its optimizer on some ranks of the job, and how they are saved; `Stateful` for torch.

    Args:
        model: sharded or not.
        group: of the ranks that have it; None where each process is alone.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.model, self.optimizer, self.group = model, adamw(model), group

    def train(self, steps: Sequence[int]) -> None:
        alone = self.group is None
        rows = (lambda tensor: tensor) if alone else of_rank(self.group.rank(), self.group.size())
        train(self.model, self.optimizer, rows, steps=steps)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def save(self, folder: Path) -> None:
        alone = self.group is None
        if not alone or dist.get_rank() == 0:
            state = {"run": self, "epoch": torch.tensor(7)}
            dcp.save(state, checkpoint_id=folder, process_group=self.group, no_dist=alone)

    def load(self, folder: Path) -> None:
        state = {"run": self, "epoch": torch.tensor(0)}
        dcp.load(state, checkpoint_id=folder, process_group=self.group, no_dist=self.group is None)
        assert int(state["epoch"]) == 7


def run_at(layout: str, seed: int = 0) -> Run | None:
    """Return a run at a layout; None on ranks that have no part in it. Collective over the job."""
    if layout == "one process":
        return Run(net(seed), None)
    mesh, group = mesh_of(layout)
    return None if group is None else Run(shard(net(seed), mesh), group)


@functools.cache
def mesh_of(layout: str) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return a mesh, and the group of its ranks where this rank is one."""
    size = dist.get_world_size()
    if layout == "half":
        first, second = (dist.new_group(half.tolist()) for half in torch.arange(size).chunk(2))
        inside = second if dist.get_rank(second) >= 0 else None
        return DeviceMesh.from_group(inside or first, "cpu"), inside
    if layout == "copies":
        shape = (2, 2) if size == 4 else (size, 1)
        return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")), dist.group.WORLD
    assert layout == "all"
    return init_device_mesh("cpu", (size,)), dist.group.WORLD


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """The states of one process: when it is saved, and a step later."""
    run = Run(net(), None)
    run.train(range(STEPS))
    saved = full_state(run.model, run.optimizer)
    run.train([STEPS])
    return [saved, full_state(run.model, run.optimizer)]


def expect_to_resume(run: Run | None, expected: list[dict[str, Any]]) -> None:
    """Compare what was loaded, and what another step makes of it."""
    states = []
    if run is not None:
        states.append(full_state(run.model, run.optimizer))
        run.train([STEPS])
        states.append(full_state(run.model, run.optimizer))
    agree(states, expected if run is not None else [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("all", "half"),
        ("half", "all"),
        ("copies", "all"),
        ("half", "copies"),
        ("all", "one process"),
        ("one process", "all"),
    ],
)
def test_what_some_ranks_saved_others_load(
    before: str, after: str, folder: Path, expected: list[dict[str, Any]]
) -> None:
    saved, loaded = run_at(before), run_at(after, seed=1)
    if saved is not None:
        saved.train(range(STEPS))
        saved.save(folder)
    referee().barrier()
    if loaded is not None:
        loaded.load(folder)
    expect_to_resume(loaded, expected)


def test_every_rank_writes_its_own_shards(folder: Path) -> None:
    run = run_at("all")
    run.save(folder)
    files = {path.name.split("_")[2] for path in folder.glob("*.distcp")}
    everyone(files == {str(rank) for rank in range(dist.get_world_size())}, f"{sorted(files)}")


def test_fsdp1_saves_what_fsdp2_loads(folder: Path, expected: list[dict[str, Any]]) -> None:
    mesh, group = mesh_of("all")
    model = FullyShardedDataParallel(
        net(), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True
    )
    saved, loaded = Run(model, group), run_at("all", seed=1)
    saved.train(range(STEPS))
    saved.save(folder)
    loaded.load(folder)
    expect_to_resume(loaded, expected)


def test_training_goes_on_while_its_state_is_saved(folder: Path, expected: list[dict[str, Any]]) -> None:
    run = run_at("all")
    run.train(range(STEPS))
    saving = dcp.async_save(
        {"run": run, "epoch": torch.tensor(7)},
        checkpoint_id=folder,
        process_group=dist.new_group(),  # the saving thread's own order
    )
    run.train(range(STEPS, STEPS + 5))
    saving.result(timeout=30)
    loaded = run_at("all", seed=1)
    loaded.load(folder)
    expect_to_resume(loaded, expected)


def test_rank_0_alone_gathers_and_spreads_a_whole_state(expected: list[dict[str, Any]]) -> None:
    run = run_at("all")
    run.train(range(STEPS))
    at_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=at_rank_0)
    everyone(bool(model) == (dist.get_rank() == 0))
    other = run_at("all", seed=1)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.model, model, options=spread)
    set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=spread)
    expect_to_resume(other, expected)


def test_checkpoints_become_files_of_torch_and_back(folder: Path) -> None:
    run = run_at("all")
    run.train(range(STEPS))
    dcp.save(get_model_state_dict(run.model), checkpoint_id=folder / "sharded")
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder / "sharded", folder / "whole.pt")
        torch_save_to_dcp(folder / "whole.pt", folder / "again")
    referee().barrier()
    whole = full_state(run.model)["model"]
    agree(torch.load(folder / "whole.pt"), whole, 0.0)
    other = run_at("all", seed=1)
    state = get_model_state_dict(other.model)
    dcp.load(state, checkpoint_id=folder / "again")
    set_model_state_dict(other.model, state)
    agree(full_state(other.model)["model"], whole, 0.0)


@contextlib.contextmanager
def refused_everywhere() -> Iterator[None]:
    """Expect torch's CheckpointException (no `Exception`) on all ranks, and a group that still works."""
    refused = False
    try:
        yield
    except CheckpointException:
        refused = True
    everyone(refused, "was not refused")
    total = torch.ones(1)
    dist.all_reduce(total)
    everyone(total.item() == dist.get_world_size())


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "removed", "without metadata"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(damage: str, folder: Path) -> None:
    run = run_at("all")
    run.save(folder)
    if dist.get_rank() == 0:
        spoil(folder, damage)
    referee().barrier()
    with refused_everywhere():
        run.load(folder)


def spoil(folder: Path, damage: str) -> None:
    """Damage what the last rank has written, or what they have all written together."""
    victim = sorted(folder.glob("*.distcp"))[-1]
    content = victim.read_bytes()
    if damage == "without metadata":
        (folder / ".metadata").unlink()
    elif damage == "removed":
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2] if damage == "cut off" else b"?" * len(content))
