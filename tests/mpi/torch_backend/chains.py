"""A chain of layers as a pipeline: every rank holds some of its stages, and knows the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH = 6, 24


class Layer(nn.Module):
    """One stage's worth of layers; `recompute` keeps no activations for the backward pass."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x))


class Scale(nn.Module):
    """Much to send and little to compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class TwoWays(nn.Module):
    """Two tensors in and out, of which one lies column by column in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, y = self.left(x), self.right(x if y is None else y)
        return x + y, torch.tanh(x * y).t().contiguous().t()


def chain(length: int, layer: Callable[[], nn.Module] = Layer) -> nn.Sequential:
    torch.manual_seed(length)
    return nn.Sequential(*(layer() for _ in range(length))).double()


def joined_batch(step: int, rows: int = BATCH, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, width]; differ by step, row and element."""
    draw = torch.Generator().manual_seed(7919 * step + 1)
    return tuple(torch.randn(rows, width, generator=draw, dtype=torch.float64) for _ in range(2))


def in_a_loop(ranks: int, stages_per_rank: int) -> list[int]:
    """The rank of every stage: 0 1 2 0 1 2."""
    return [stage % ranks for stage in range(ranks * stages_per_rank)]


def in_a_v(ranks: int, stages_per_rank: int = 2) -> list[int]:
    """The rank of every stage: 0 1 2 2 1 0."""
    assert stages_per_rank == 2
    return [*range(ranks), *reversed(range(ranks))]


def stages_of(model: nn.Sequential, where: Sequence[int], group: dist.ProcessGroup) -> list[PipelineStage]:
    """This rank's stages of a chain whose layers lie on the group's ranks as `where` says."""
    rank = dist.get_rank(group)
    return [
        PipelineStage(model[stage], stage, len(where), torch.device("cpu"), group=group)
        for stage, owner in enumerate(where)
        if owner == rank
    ]


def mine(model: nn.Sequential, stages: Sequence[PipelineStage]) -> list[nn.Module]:
    """The layers of a chain that are the stages of this rank."""
    return [model[stage.stage_index] for stage in stages]


def through(layers: Iterable[nn.Module], inputs: Any) -> Any:
    """What a chain makes of its inputs, also where its layers hand on several tensors."""
    for layer in layers:
        inputs = layer(*inputs) if isinstance(inputs, tuple) else layer(inputs)
    return inputs


def run_step(
    schedule: Any, stages: Sequence[PipelineStage], inputs: Tensor, targets: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """One pass of a batch: what comes out and the losses, on the rank that has the last stage."""
    losses: list[Tensor] = []
    given = (inputs,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        return schedule.step(*given, target=targets, losses=losses), losses
    schedule.step(*given)
    return None, []
