"""Layers that are in memory only while they compute: same losses, same values, same saved state."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from test_offload import (
    BODIES,
    FEATURES,
    OPTIMIZERS,
    assert_equal_states,
    batch,
    piece_by_piece,  # noqa: F401  # a fixture
    plain_step,
    same_folder,
)
from torch import nn
from verdicts import everyone, raises_everywhere, referee

import mpisgd


class Model(nn.Module):
    """Layers that are used in order, with one that is frozen and one that is not used in every step."""

    def __init__(self, dtype=torch.float64) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 40, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(40, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(3))
        self.frozen = nn.Linear(40, 40, dtype=dtype).requires_grad_(False)
        self.extra = nn.Linear(40, 40, dtype=dtype)

    def forward(self, x, use_extra):
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x)
        return x + self.extra(x) if use_extra else x


class Block(nn.Module):
    def __init__(self, dtype) -> None:
        super().__init__()
        self.first = nn.Linear(40, 64, dtype=dtype)
        self.second = nn.Linear(64, 40, dtype=dtype)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def description(tmp_path, **options):
    options = {
        "what": "optimizer,parameters",
        "block_bytes": 4096,
        "io": "buffered",
        "prefetch": 1,
        **options,
    }
    return mpisgd.Offload(same_folder(tmp_path), **options)


def distribute(model, kind="adamw", **options):
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    return mpisgd.DistributedOptimizer(optimizer, **options)


def streamed(tmp_path, *, kind="adamw", device="cpu", **options):
    torch.manual_seed(5)
    offload = description(tmp_path, **options)
    with torch.device(device):
        model = Model()
    mpisgd.offload_parameters(model, offload)
    return model, distribute(model, kind, strategy=mpisgd.Sharded(2, offload=offload))


def in_memory(kind="adamw"):
    torch.manual_seed(5)
    model = Model()
    return model, distribute(model, kind)


def assert_equal_values(one, other):
    values, others = one.state_dict(), other.state_dict()
    assert list(values) == list(others)
    for name, value in values.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_equals_the_model_in_memory(tmp_path, body, kind):
    if kind != "adamw" and body is not plain_step:
        pytest.skip("the same as with adamw")
    ours, theirs = streamed(tmp_path, kind=kind), in_memory(kind)
    for step in range(4):
        said = body(*ours, step), body(*theirs, step)
        near = torch.tensor(said, dtype=torch.float64)
        everyone(torch.allclose(near[0], near[1], rtol=1e-12, atol=0), f"step {step}: {said}")
    values, others = ours[0].state_dict(), theirs[0].state_dict()
    for name, value in values.items():
        everyone(torch.allclose(value, others[name], rtol=1e-11, atol=1e-13), name)
    if body is plain_step:
        assert_equal_values(ours[0], theirs[0])
        assert_equal_states(ours[1].state_dict(), theirs[1].state_dict())


def test_a_model_on_meta_begins_as_one_in_memory(tmp_path):
    ours, theirs = streamed(tmp_path, device="meta"), in_memory()
    assert_equal_values(ours[0], theirs[0])
    plain_step(*ours, 1)
    plain_step(*theirs, 1)
    assert_equal_values(ours[0], theirs[0])


def test_parameters_have_no_memory_between_steps(tmp_path):
    model, optimizer = streamed(tmp_path)
    seen = []
    model.blocks[1].register_forward_pre_hook(
        lambda *_: seen.append([p.untyped_storage().nbytes() > 0 for p in model.parameters()])
    )
    for step in range(2):
        plain_step(model, optimizer, step)
        assert not any(param.untyped_storage().nbytes() for param in model.parameters())
        assert all(param.grad is None for param in model.parameters())
    names = [name for name, _ in model.named_parameters()]
    for there in seen:
        assert {name for name, here in zip(names, there, strict=True) if here} <= {
            f"blocks.1.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")
        }


def test_values_and_state_go_to_memory_and_back(tmp_path):
    first, second = streamed(tmp_path), streamed(tmp_path)
    for step in range(2):
        plain_step(*first, step)
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    plain_step(*second, 7)  # something else was there before
    in_mem = in_memory()
    for model, optimizer in (second, in_mem):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    for step in range(2, 4):
        said = [plain_step(*run, step) for run in (first, second, in_mem)]
        everyone(said[0] == said[1] == said[2], f"{said}")
    assert_equal_values(first[0], second[0])
    assert_equal_values(first[0], in_mem[0])


def test_shards_are_saved_and_loaded(tmp_path):
    first, second = streamed(tmp_path), streamed(tmp_path)
    for step in range(2):
        plain_step(*first, step)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_shard_state_dicts(referee().allgather(first[1].shard_state_dict()))
    said = [plain_step(*run, 2) for run in (first, second)]
    everyone(said[0] == said[1], f"{said}")
    assert_equal_values(first[0], second[0])


def test_gradients_of_several_passes_add_up_and_are_reset(tmp_path):
    ours, theirs = streamed(tmp_path), in_memory()
    for model, optimizer in (ours, theirs):
        plain_step(model, optimizer, 0)
        model(torch.ones(5, FEATURES, dtype=torch.float64), True).sum().backward()
        optimizer.zero_grad()
        plain_step(model, optimizer, 1)
    assert_equal_values(ours[0], theirs[0])


def test_evaluation_needs_no_backward(tmp_path):
    ours, theirs = streamed(tmp_path), in_memory()
    x = torch.ones(5, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(ours[0].eval()(x, True), theirs[0].eval()(x, True))
    assert not any(param.untyped_storage().nbytes() for param in ours[0].parameters())


def test_activation_checkpointing_computes_layers_again(tmp_path):
    from torch.utils.checkpoint import checkpoint

    def step(model, optimizer):
        optimizer.zero_grad()
        x = model.embed(torch.linspace(-1, 1, 5 * FEATURES, dtype=torch.float64).view(5, FEATURES))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.square().sum().backward()
        optimizer.step()

    ours, theirs = streamed(tmp_path), in_memory()
    for _ in range(2):
        step(*ours)
        step(*theirs)
    assert_equal_values(ours[0], theirs[0])


def test_a_failing_read_in_forward_is_told_on_every_rank(tmp_path, monkeypatch):
    model, optimizer = streamed(tmp_path)
    plain_step(model, optimizer, 0)

    def broken(*_):
        raise OSError(5, "Input/output error")

    if mpisgd.rank() == mpisgd.size() - 1:
        monkeypatch.setattr(os, "preadv", broken)
    with raises_everywhere(mpisgd.OffloadError) as caught:
        for step in range(1, 3):
            plain_step(model, optimizer, step)
    everyone("parameters of rank" in caught.text or "gradients of rank" in caught.text, caught.text)


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.offset = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) + self.offset


def test_parameters_of_the_model_itself_are_there_while_it_computes(tmp_path):
    offload = description(tmp_path)
    torch.manual_seed(1)
    models = [Direct(), Direct()]
    models[1].load_state_dict(models[0].state_dict())
    mpisgd.offload_parameters(models[0], offload)
    optimizers = [
        mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        for model, strategy in zip(models, (mpisgd.Sharded(offload=offload), None), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.arange(3.0)).square().sum().backward()
        optimizer.step()
    assert_equal_values(*models)


def tied_model():
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(4)))
    model[3].weight = model[0].weight
    return model


def test_layers_may_share_a_weight(tmp_path):
    offload, runs = description(tmp_path), []
    for strategy in (mpisgd.Sharded(offload=offload), None):
        model = tied_model()
        if strategy is not None:
            mpisgd.offload_parameters(model, offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        runs.append((model, mpisgd.DistributedOptimizer(optimizer, strategy=strategy)))
    for step in range(3):
        for model, optimizer in runs:
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            optimizer.step()
    assert_equal_values(runs[0][0], runs[1][0])
    assert_equal_states(runs[0][1].state_dict(), runs[1][1].state_dict())


def test_mistakes_are_told(tmp_path):
    offload = description(tmp_path)
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.offload_parameters(nn.Linear(2, 2), mpisgd.Offload(same_folder(tmp_path)))
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.offload_parameters(Model(), offload, layers=[nn.Linear(2, 2)])
    everyone("modules of the model" in caught.text, caught.text)
    model = Model()
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.offload_parameters(model, offload, layers=list(model.blocks))
    everyone("embed.weight is in none of the layers" in caught.text, caught.text)
    mpisgd.offload_parameters(model, offload)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.offload_parameters(model, offload)
    everyone("is in a file already" in caught.text, caught.text)
    with torch.device("meta"):
        direct = Direct()
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.offload_parameters(direct, offload)
    everyone("Direct is on the device meta" in caught.text, caught.text)
