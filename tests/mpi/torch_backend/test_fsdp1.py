"""FullyShardedDataParallel (FSDP1) on our groups trains as one process does on the joined batches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joined import (
    MAX_NORM,
    Block,
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from verdicts import everyone, same_on_all_ranks

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated"),
    pytest.mark.filterwarnings("ignore:FSDP.state_dict_type.. and FSDP.set_state_dict_type"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),  # of its own
]

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, flat parameters": {"use_orig_params": False},
    "gradients": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "prefetch": {"forward_prefetch": True, "limit_all_gathers": False},
    "one flat parameter": {"auto_wrap_policy": None},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "hybrid, gradients": {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
}


def shard(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options = {
        "auto_wrap_policy": ModuleWrapPolicy({Block, nn.Linear}),
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    } | options
    return FullyShardedDataParallel(model, **options)


@pytest.fixture(scope="module")
def grid() -> DeviceMesh:
    """Two copies of a model in two shards each."""
    return init_device_mesh("cpu", (2, 2))


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """The state of a model and its optimizer after training on one process."""
    model = net()
    optimizer = adamw(model)
    train(model, optimizer)
    return full_state(model, optimizer)


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_one_process(way: str, trained: dict[str, Any], request: pytest.FixtureRequest) -> None:
    options = dict(WAYS[way])
    if "hybrid" in way:
        if dist.get_world_size() != 4:
            pytest.skip("copies of shards need four ranks")
        options["device_mesh"] = request.getfixturevalue("grid")
    model = shard(net(), **options)
    optimizer = adamw(model)
    train(model, optimizer, of_rank())
    agree(full_state(model, optimizer), trained)


def test_accumulates_without_communication() -> None:
    model, plain = shard(net()), net()
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            loss(model, 0, of_rank(), micro).backward()
        loss(plain, 0, micro=micro).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        ours = [param.grad for param in model.parameters()]
        agree(ours, [param.grad for param in plain.parameters()])


def test_clips_by_the_norm_of_all_shards() -> None:
    # In float32: FSDP1 takes norms in that type and refuses float64.
    model, plain = shard(net(dtype=torch.float32)), net(dtype=torch.float32)
    rows = in_float32(of_rank())
    norms = train(model, adamw(model), rows, clip=lambda model: float(model.clip_grad_norm_(MAX_NORM)))
    expected = train(plain, adamw(plain), in_float32(lambda tensor: tensor), clip=clip)
    everyone(min(expected) > MAX_NORM)
    same_on_all_ranks(norms)
    agree([full_state(model), norms], [full_state(plain), expected], 1e-5)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision_rounds_where_it_says(wire: torch.dtype) -> None:
    if wire == torch.bfloat16 and dist.get_world_size() == 3:
        pytest.skip("torch divides the rounded sum of three once more")
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=wire, cast_forward_inputs=True)
    model, plain = shard(net(dtype=torch.float32), mixed_precision=policy), net(dtype=torch.float32)
    train(model, sgd(model), in_float32(of_rank()))
    train_in_bfloat16(plain, sgd(plain), wire)
    agree(full_state(model), full_state(plain), 1e-5)


def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    model = shard(net(dtype=torch.float32))
    optimizer = sgd(model)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**4)
    before = full_state(model)
    scaler.scale(loss(model, 0, in_float32(of_rank()))).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        next(param for param in model.parameters() if param.numel()).grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    agree([full_state(model), scaler.get_scale()], [before, 2.0**3], 0.0)


# With its default, offload_to_cpu=True, torch hands out aliases of one buffer where the state is on the CPU
# already: `exp_avg` has the values of `exp_avg_sq` then, with every backend.
STATE_DICTS: dict[str, tuple[StateDictType, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(offload_to_cpu=False)),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig()),
}


@pytest.mark.parametrize("kind", STATE_DICTS)
def test_state_dicts_bring_back_model_and_optimizer(kind: str, trained: dict[str, Any]) -> None:
    model, other = shard(net()), shard(net(seed=1), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer, resumed = adamw(model), adamw(other)
    train(model, optimizer, of_rank())
    form, optimizer_form = STATE_DICTS[kind]
    with FullyShardedDataParallel.state_dict_type(model, form, None, optimizer_form):
        state = model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(other, form, None, optimizer_form):
        other.load_state_dict(state)
        resumed.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, resumed, moments))
    agree(full_state(other, resumed), trained)
