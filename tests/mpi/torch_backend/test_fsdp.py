"""`fully_shard` (FSDP2, and HSDP on a mesh of two dimensions) trains as one process on the joined batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from joined import (
    MAX_NORM,
    adamw,
    agree,
    clip,
    full_state,
    in_float32,
    loss,
    net,
    of_rank,
    sgd,
    train,
    train_in_bfloat16,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from verdicts import everyone, same_on_all_ranks

pytestmark = pytest.mark.mpi(min_size=2)

Trained = tuple[dict[str, Any], list[float]]


def shard(model: nn.Sequential, **options: Any) -> Any:
    """Shard each block by itself, then the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@pytest.fixture(scope="module")
def grid() -> DeviceMesh:
    """Copies of a model by shards of it: two by two on four ranks, else copies alone."""
    size = dist.get_world_size()
    shape = (2, 2) if size == 4 else (size, 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))


@pytest.fixture(scope="module")
def trained() -> Trained:
    """The state and the gradients' norms after training on one process with gradients that are clipped."""
    model = net()
    optimizer = adamw(model)
    norms = train(model, optimizer, clip=clip)
    assert min(norms) > MAX_NORM
    return full_state(model, optimizer), norms


def expect(trained: Trained, model: nn.Module) -> None:
    """Train the sharded model and compare."""
    optimizer = adamw(model)
    norms = train(model, optimizer, of_rank(), clip=clip)
    same_on_all_ranks(norms)
    agree((full_state(model, optimizer), norms), trained)


@pytest.mark.parametrize("reshard", [True, False, 2], ids=str)
def test_trains_as_one_process(reshard: bool | int, trained: Trained) -> None:
    if reshard == 2 and dist.get_world_size() != 4:
        pytest.skip("shards are gathered within halves of four ranks")
    model = shard(net(), reshard_after_forward=reshard)
    everyone(sum(param.to_local().numel() for param in model.parameters()) < sum_of_sizes(model))
    expect(trained, model)


def sum_of_sizes(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_copies_of_shards_train_as_one_process(grid: DeviceMesh, trained: Trained) -> None:
    expect(trained, shard(net(), mesh=grid))


def test_prefetch_trains_as_one_process(trained: Trained) -> None:
    model = shard(net())
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    model._set_unshard_async_op(True)  # the only way to have the gathering overlap without a GPU
    expect(trained, model)


def test_activation_checkpoints_train_as_one_process(trained: Trained) -> None:
    model = net()
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.blocks))
    model = shard(model)
    optimizer = adamw(model)
    norms = train(model, optimizer, of_rank(), clip=clip)
    agree((full_state(model, optimizer), norms), trained)


def test_parameters_are_gathered_on_request() -> None:
    model, plain = shard(net()), net()
    handle = model.unshard(async_op=True)
    handle.wait()
    agree(list(model.first.parameters()), list(plain.first.parameters()), 0.0)
    model.reshard()
    everyone(model.first.weight.to_local().numel() < model.first.weight.numel())


@pytest.mark.parametrize("copies", [False, True], ids=["shards", "copies of shards"])
def test_accumulates_without_communication(copies: bool, grid: DeviceMesh) -> None:
    model, plain = shard(net(), mesh=grid if copies else None), net()
    for micro in range(3):
        last = micro == 2
        if copies:
            model.set_requires_all_reduce(last)
        else:
            model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        loss(model, 0, of_rank(), micro).backward()
        loss(plain, 0, micro=micro).backward()
    agree(gradients(model), gradients(plain))


def gradients(model: nn.Module) -> list[Tensor | None]:
    grads: Any = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def test_frozen_and_unused_parameters_get_no_gradients() -> None:
    model, plain = net(), net()
    for one in (model, plain):
        one.first.requires_grad_(False)
        one.blocks[0].spare = nn.Linear(2, 2).double()
    shard(model)
    loss(model, 0, of_rank()).backward()
    loss(plain, 0).backward()
    everyone(sum(grad is None for grad in gradients(plain)) == 4)
    agree(gradients(model), gradients(plain))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision_rounds_where_it_says(wire: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=wire)
    model, plain = shard(net(dtype=torch.float32), mp_policy=policy), net(dtype=torch.float32)
    train(model, sgd(model), in_float32(of_rank()))
    train_in_bfloat16(plain, sgd(plain), wire)
    agree(full_state(model), full_state(plain), 1e-5)


@pytest.mark.parametrize("by_backend", [True, False], ids=["premultiplied sum", "sum"])
def test_gradients_are_divided_by_the_factor_asked_for(by_backend: bool) -> None:
    model, plain = shard(net(dtype=torch.float32)), net(dtype=torch.float32)
    for part in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        part.set_gradient_divide_factor(0.7 * dist.get_world_size())
        part.set_force_sum_reduction_for_comms(not by_backend)
    loss(model, 0, in_float32(of_rank())).backward()
    (loss(plain, 0, in_float32(lambda tensor: tensor)) / 0.7).backward()
    agree(gradients(model), gradients(plain), 1e-6)


def test_a_model_without_memory_takes_the_state_of_rank_0(trained: Trained) -> None:
    with torch.device("meta"):
        model = net()
    shard(model).to_empty(device="cpu")
    state = net().state_dict() if dist.get_rank() == 0 else {}
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=everywhere)
    expect(trained, model)
