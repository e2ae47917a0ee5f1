"""What every way of sharding is held against: the same training on one process and the joined batches."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from verdicts import everyone, referee

BATCH = 12  # 1, 2, 3 and 4 ranks divide it
FEATURES, WIDTH, TARGETS = 4, 7, 2  # which they do not all divide: shards are padded, some are empty
STEPS = 3
DRIFT = 1e-12  # float64: the largest that was seen is 2e-15
MAX_NORM = 0.5  # every step is clipped

Rows = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small model with modules in modules."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = {
            "first": nn.Linear(FEATURES, WIDTH),
            "blocks": nn.Sequential(Block(), Block()),
            "last": nn.Linear(WIDTH, TARGETS),
        }
    return nn.Sequential(OrderedDict(layers)).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """The joined batch of one pass: differs by step and pass, by row and by element."""
    draw = torch.Generator().manual_seed(7919 * step + 104729 * micro + 1)
    inputs = torch.randn(BATCH, FEATURES, generator=draw, dtype=torch.float64)
    return inputs, torch.randn(BATCH, TARGETS, generator=draw, dtype=torch.float64)


def all_rows(tensor: Tensor) -> Tensor:
    return tensor


def of_rank(rank: int | None = None, size: int | None = None) -> Rows:
    """Return what takes one rank's rows of a joined batch; of this rank in the job unless told otherwise."""
    rank = dist.get_rank() if rank is None else rank
    size = dist.get_world_size() if size is None else size
    return lambda tensor: tensor.chunk(size)[rank]


def in_float32(rows: Rows) -> Rows:
    return lambda tensor: rows(tensor).float()


def loss(model: nn.Module, step: int, rows: Rows = all_rows, micro: int = 0) -> Tensor:
    inputs, targets = (rows(tensor) for tensor in batch(step, micro))
    return nn.functional.mse_loss(model(inputs).to(targets.dtype), targets)


def clip(model: nn.Module) -> float:
    """Clip the gradients of a plain model, or of one whose parameters are DTensors; return their norm."""
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return float(getattr(norm, "full_tensor", lambda: norm)())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Rows = all_rows,
    *,
    steps: Iterable[int] = range(STEPS),
    clip: Callable[[Any], float] | None = None,
) -> list[float]:
    """Train; return the norm that the gradients had in each step, where they are clipped."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rows).backward()
        if clip is not None:
            norms.append(clip(model))
        optimizer.step()
    return norms


def train_in_bfloat16(model: nn.Module, optimizer: torch.optim.Optimizer, wire: torch.dtype) -> None:
    """Train in float32: all ranks' rows through bfloat16 copies, whose gradients are averaged as `wire`."""
    size = dist.get_world_size()
    for step in range(STEPS):
        parts = [_bfloat16_gradients(model, step, in_float32(of_rank(rank, size))) for rank in range(size)]
        for param, *grads in zip(model.parameters(), *parts, strict=True):
            param.grad = torch.stack(grads).float().mean(0).to(wire).float()
        optimizer.step()


def _bfloat16_gradients(model: nn.Module, step: int, rows: Rows) -> tuple[Tensor, ...]:
    copies = copy.deepcopy(model).bfloat16()
    inputs, targets = (rows(tensor) for tensor in batch(step))
    outputs = copies(inputs.bfloat16()).float()
    return torch.autograd.grad(nn.functional.mse_loss(outputs, targets), list(copies.parameters()))


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return a copy of what a model, sharded or not, and its optimizer hold, whole on every rank."""
    whole = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=whole)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=whole)
    return copy.deepcopy(state)


def difference(ours: Any, expected: Any) -> float:
    """Return the largest difference between two values, lists or dictionaries of them; inf for other keys."""
    if isinstance(expected, Mapping):
        if set(ours) != set(expected):
            return float("inf")
        return max([difference(ours[key], value) for key, value in expected.items()], default=0.0)
    if isinstance(expected, list | tuple):
        pairs = zip(ours, expected, strict=True)
        return max([difference(one, other) for one, other in pairs], default=0.0)
    if isinstance(expected, Tensor):
        if ours.shape != expected.shape or ours.dtype != expected.dtype:
            return float("inf")
        return float((ours - expected).detach().abs().max()) if expected.numel() else 0.0
    if isinstance(expected, float):
        return abs(ours - expected)
    return 0.0 if ours == expected else float("inf")


def agree(ours: Any, expected: Any, tolerance: float = DRIFT) -> None:
    """Fail on all ranks unless every rank has what is expected; print the largest difference of all ranks."""
    found = difference(ours, expected)
    print(f"max difference {max(referee().allgather(found)):.1e}")
    everyone(found <= tolerance, f"differs by {found:.1e}, not by at most {tolerance:.1e}")
