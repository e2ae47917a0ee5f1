"""State in files changes nothing: same losses, parameters and saved state, to the last bit."""

from __future__ import annotations

import copy
import os

import pytest
import safetensors.torch
import torch
from torch import nn
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd import checkpoint
from mpisgd.sharding import piece_update
from mpisgd.transport import staging_layout

FEATURES = 24
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
}


class Net(nn.Module):
    """Layers that are used in order; one weight is used twice, one layer not in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 40)
        self.layers = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh())
        self.extra = nn.Linear(40, 40)
        self.scale = nn.Linear(1, 40)
        self.head = nn.Linear(FEATURES, 40, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())
        self.head.weight = self.embed.weight
        self.scale.weight.requires_grad_(False)

    def forward(self, x, use_extra):
        x = self.layers(torch.tanh(self.embed(x)))
        x = x + self.extra(x) if use_extra else x
        return nn.functional.linear(x * self.scale(torch.ones(1, dtype=x.dtype)), self.head.weight.T)


@pytest.fixture(autouse=True)
def piece_by_piece(monkeypatch):
    """The pieces are small here: together they would have all blocks in memory."""
    monkeypatch.setattr(piece_update, "BATCH_BYTES", 1)


def same_folder(tmp_path):
    """The folder of rank 0: pytest gives each rank its own."""
    return referee().bcast(str(tmp_path))


def batch(step, k=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * k + mpisgd.rank())
    return torch.randn(5, FEATURES, generator=generator, dtype=torch.float64)


def plain_step(model, optimizer, step):
    optimizer.zero_grad()
    loss = model(batch(step), step % 3 > 0).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def clipped_step(model, optimizer, step):
    optimizer.zero_grad()
    loss = model(batch(step), True).square().sum()
    loss.backward()
    norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    return loss.item(), norm.item()


def accumulating_step(model, optimizer, step):
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(batch(step, 1), True).square().sum().backward()
    loss = model(batch(step, 2), True).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def closure_step(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = model(batch(step), True).square().sum()
        loss.backward()
        return loss.detach()

    return optimizer.step(closure).item()


BODIES = [plain_step, clipped_step, accumulating_step, closure_step]


def start(kind="adamw", **options):
    torch.manual_seed(3)
    model = Net().double()
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, mpisgd.DistributedOptimizer(OPTIMIZERS[kind](groups), **options)


def are_equal(one, other, limit=0.0):
    """Whether two tensors or numbers are the same; with a limit, but for rounding."""
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return torch.allclose(one, other, rtol=limit, atol=limit) if limit else torch.equal(one, other)


def assert_equal_states(one, other, limit=0.0):
    assert one["state"].keys() == other["state"].keys()
    for index, entries in one["state"].items():
        assert list(entries) == list(other["state"][index])
        for name, value in entries.items():
            assert are_equal(value, other["state"][index][name], limit)


def check_equal(ours, theirs, body, steps, limit=0.0):
    for step in steps:
        said = body(*ours, step), body(*theirs, step)
        everyone(are_equal(*said, limit), f"step {step}: {said}")
    pairs = zip(ours[0].parameters(), theirs[0].parameters(), strict=True)
    everyone(all(are_equal(a, b, limit) for a, b in pairs), "parameters differ")
    states = ours[1].state_dict(), theirs[1].state_dict()
    assert_equal_states(*states, limit)
    return states


def offload_in(tmp_path, **options):
    return mpisgd.Offload(same_folder(tmp_path), block_bytes=4096, **{"io": "buffered", **options})


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("body", BODIES)
def test_it_equals_the_state_in_memory(tmp_path, stage, body):
    offload = offload_in(tmp_path, prefetch=stage, checksum="crc32")
    ours = start(strategy=mpisgd.Sharded(stage, offload=offload))
    limit = 1e-12 if body is clipped_step else 0.0  # the norm is summed in other pieces in memory
    check_equal(ours, start(strategy=mpisgd.Sharded(stage)), body, range(5), limit)


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.long), "momentum"])
def test_other_optimizers_and_shared_parameters(tmp_path, kind):
    strategies = mpisgd.Sharded(offload=offload_in(tmp_path, io="auto")), mpisgd.Sharded()
    ours, theirs = (start(kind, strategy=strategy, share_parameters=True) for strategy in strategies)
    check_equal(ours, theirs, plain_step, range(4))


def test_with_masters_of_a_model_in_bfloat16(tmp_path):
    runs = []
    for offload in (offload_in(tmp_path), None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 8)).bfloat16()
        strategy = mpisgd.Sharded(2, master_dtype=torch.float32, offload=offload)
        runs.append(
            (model, mpisgd.DistributedOptimizer(torch.optim.Adam(model.parameters()), strategy=strategy))
        )

    def step(model, optimizer, step):
        optimizer.zero_grad()
        loss = model(batch(step).bfloat16()).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    check_equal(*runs, step, range(4))


def test_shards_are_saved_and_loaded(tmp_path):
    strategy = mpisgd.Sharded(offload=offload_in(tmp_path))
    first, second, in_memory = (
        start(strategy=strategy),
        start(strategy=strategy),
        start(strategy=mpisgd.Sharded()),
    )
    for step in range(2):
        plain_step(*first, step)
    shards = referee().allgather(first[1].shard_state_dict())
    for model, optimizer in (second, in_memory):
        model.load_state_dict(first[0].state_dict())
        optimizer.load_shard_state_dicts(shards)
    check_equal(second, in_memory, plain_step, range(2, 4))


def test_a_state_goes_from_files_to_memory_and_back(tmp_path):
    strategy = mpisgd.Sharded(offload=offload_in(tmp_path))
    first = start(strategy=strategy)
    for step in range(3):
        plain_step(*first, step)
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    in_memory, in_files = start(), start(strategy=strategy)
    for model, optimizer in (in_memory, in_files):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    check_equal(in_files, in_memory, plain_step, range(3, 6))


def test_safetensors_opens_the_file_of_a_rank(tmp_path):
    model, optimizer = start(strategy=mpisgd.Sharded(offload=offload_in(tmp_path)))
    for step in range(2):
        plain_step(model, optimizer, step)
    found = safetensors.torch.load_file(f"/proc/self/fd/{optimizer.synchronizer.state_file()}")
    state, seen = optimizer.state_dict()["state"], referee().allgather(found)
    whole = {name: tensor for of_rank in seen for name, tensor in of_rank.items()}
    names = [name for name in whole if name.endswith(".exp_avg")]
    everyone(bool(names), f"{list(whole)}")
    total = sum(whole[name].square().sum() for name in names)
    expected = sum(entries["exp_avg"].square().sum() for entries in state.values())
    everyone(torch.allclose(total, expected), f"{total}, {expected}")


def test_a_checkpoint_has_the_whole_state_and_nothing_else_is_in_the_folder(tmp_path):
    folder = same_folder(tmp_path)
    model, optimizer = start(strategy=mpisgd.Sharded(2, offload=offload_in(tmp_path)))
    for step in range(2):
        plain_step(model, optimizer, step)
    path = checkpoint.save(folder, 2, model=model, optimizer=optimizer)
    everyone(os.listdir(folder) == [path.name], f"{os.listdir(folder)}")
    other = start()
    checkpoint.load(path, model=other[0], optimizer=other[1])
    mapped = start(strategy=mpisgd.Sharded(2, offload=offload_in(tmp_path)))
    checkpoint.load(path, model=mapped[0], optimizer=mapped[1], scratch=folder)
    check_equal(mapped, other, plain_step, range(2, 4))
    everyone(os.listdir(folder) == [path.name], f"{os.listdir(folder)}")


def test_a_full_disk_on_one_rank_is_told_on_every_rank_and_the_checkpoint_stays(tmp_path, monkeypatch):
    folder = same_folder(tmp_path)
    model, optimizer = start(strategy=mpisgd.Sharded(offload=offload_in(tmp_path)))
    plain_step(model, optimizer, 0)
    path = checkpoint.save(folder, 1, model=model, optimizer=optimizer)
    broken = mpisgd.size() - 1

    def full(*_):
        raise OSError(28, "No space left on device")

    if mpisgd.rank() == broken:
        monkeypatch.setattr(os, "pwritev", full)
    with raises_everywhere(mpisgd.OffloadError) as caught:
        for step in range(1, 4):  # a write behind a step is told by the next one
            plain_step(model, optimizer, step)
    monkeypatch.undo()
    same_on_all_ranks(caught.text)
    everyone(
        f"rank {broken}: offload: the file of optimizer state of rank {broken}" in caught.text, caught.text
    )
    everyone("No space left on device" in caught.text and folder in caught.text, caught.text)
    other = start(strategy=mpisgd.Sharded(offload=offload_in(tmp_path)))
    checkpoint.load(path, model=other[0], optimizer=other[1])
    plain_step(*other, 1)


@pytest.mark.processes
def test_a_failing_read_on_the_first_rank_is_told_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(staging_layout, "BUFFER_BYTES", 4096 * mpisgd.size())  # not all pieces are in memory
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(40))).double()
    strategy = mpisgd.Sharded(offload=offload_in(tmp_path, prefetch=1))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.Adam(model.parameters()), strategy=strategy)

    def one_step():
        optimizer.zero_grad()
        model(batch(0)).sum().backward()
        optimizer.step()

    one_step()

    def broken(*_):
        raise OSError(5, "Input/output error")

    if mpisgd.rank() == 0:
        monkeypatch.setattr(os, "preadv", broken)
    with raises_everywhere(mpisgd.OffloadError) as caught:
        one_step()
    everyone("rank 0: " in caught.text and "Input/output error" in caught.text, caught.text)


def test_a_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path):
    with raises_everywhere(mpisgd.OffloadError) as caught:
        start(strategy=mpisgd.Sharded(offload=mpisgd.Offload("/proc/none/such")))
    everyone("/proc/none/such could not be made" in caught.text, caught.text)


def test_what_does_not_go_with_it_is_refused(tmp_path):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    offload = offload_in(tmp_path)
    model = nn.Linear(2, 2)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(Own(model.parameters(), lr=0.1), strategy=mpisgd.Sharded(offload=offload))
    everyone("Own" in caught.text and "offload" in caught.text, caught.text)
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.Sharded(offload="/scratch")
    both = mpisgd.Sharded(offload=offload_in(tmp_path, what="optimizer,parameters"))
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=both)
    everyone("mpisgd.offload_parameters" in caught.text, caught.text)
