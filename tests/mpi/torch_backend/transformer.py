"""A tiny transformer in float64, and how torch's tensor parallelism lays it out over a mesh."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

HEADS, WIDTH, SEQUENCE = 12, 24, 12  # 1, 2, 3 and 4 ranks divide them
VOCABULARY = 26  # 3 and 4 ranks do not
BATCH = 12


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal; the number of heads is whatever the layers before it have left to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [_split_heads(layer(x)) for layer in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _split_heads(x: Tensor) -> Tensor:
    """From [batch, sequence, width] to [batch, heads, sequence, width of a head]."""
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def transformer(blocks: int = 1) -> nn.Sequential:
    """From tokens [batch, sequence] to logits [batch, sequence, vocabulary]; any slice of it is a stage."""
    torch.manual_seed(blocks)
    layers: dict[str, nn.Module] = {"embedding": nn.Embedding(VOCABULARY, WIDTH)}
    layers |= {f"block{number}": Block() for number in range(blocks)}
    layers |= {"norm": nn.LayerNorm(WIDTH), "output": nn.Linear(WIDTH, VOCABULARY, bias=False)}
    return nn.Sequential(OrderedDict(layers)).double()


def joined_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows them, each [BATCH, SEQUENCE]; differs by step, row and place."""
    draw = torch.Generator().manual_seed(7919 * step + 1)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def spread_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Megatron's layout: columns, then rows; between blocks every rank has its part of the sequence."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "norm1": SequenceParallel(),
        "attention": gathered,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": gathered,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)


def spread(model: nn.Sequential, mesh: DeviceMesh, *, split_logits: bool = False) -> nn.Sequential:
    """Vocabulary, heads, hidden units and sequence over `mesh`; the logits too, for `loss_parallel`."""
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if split_logits else Replicate(),
            use_local_output=not split_logits,
        ),
    }
    for name, layer in model.named_children():
        if isinstance(layer, Block):
            spread_block(layer, mesh)
        else:
            parallelize_module(layer, mesh, styles[name])
    return model


def is_spread(model: nn.Module) -> bool:
    """Whether every parameter is a distributed one."""
    return all(isinstance(param, DTensor) for param in model.parameters())
