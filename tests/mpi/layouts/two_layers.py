"""A transformer of two layers in float64, the names of its dimensions, and its training on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, MODEL, HEADS, HIDDEN, VOCAB = 12, 12, 24, 12, 48, 36  # 2, 3 and 4 ranks divide them
STEPS = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(MODEL, MODEL, bias=False) for _ in range(3))
        self.out = nn.Linear(MODEL, MODEL)
        self.by_name = False  # whether attention gets its tensors by keyword

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        attention = nn.functional.scaled_dot_product_attention
        if self.by_name:
            mixed = attention(**dict(zip(("query", "key", "value"), heads, strict=True)), is_causal=True)
        else:
            mixed = attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(MODEL), Attention()
        self.norm2, self.up, self.down = (
            nn.LayerNorm(MODEL),
            nn.Linear(MODEL, HIDDEN),
            nn.Linear(HIDDEN, MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """From tokens [batch, length] to logits [batch, length, vocab]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, MODEL)
        self.register_buffer("position", torch.randn(LENGTH, MODEL))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.output = nn.LayerNorm(MODEL), nn.Linear(MODEL, VOCAB, bias=False)
        self.recomputes = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.output(self.norm(x))


STATES = ("batch", "length", "model")
NAMES = {
    "embedding.weight": ("vocab", "model"),
    "position": ("length", "model"),
    "layers.*.attention.*.weight": ("heads", "model"),
    "layers.*.norm*.*": ("model",),
    "layers.*.up.weight": ("hidden", "model"),
    "layers.*.up.bias": ("hidden",),
    "layers.*.down.weight": ("model", "hidden"),
    "layers.*.down.bias": ("model",),
    "norm.*": ("model",),
    "output.weight": ("vocab", "model"),
    "embedding": STATES,
    "layers.*.attention": STATES,
    "layers.*.down": STATES,
    "layers.*.up": ("batch", "length", "hidden"),
}
NAMES = {
    "layers.*.attention.out.weight": ("model", "heads"),
    "layers.*.attention.out.bias": ("model",),
    **NAMES,
}
IO: dict[str, Any] = {"inputs": ("batch", "length"), "outputs": ("batch", "length", "vocab")}


def transformer() -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Transformer().double()


def joined_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows them, equal on all ranks; differ by step, row and place."""
    draw = torch.Generator().manual_seed(7919 * step + 1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model: nn.Module, lay_out: Callable[[Tensor], Tensor] = lambda targets: targets) -> list[Tensor]:
    """Some steps; the logits and losses of all, the gradients of the first, the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []
    for step in range(STEPS):
        tokens, targets = joined_batch(step)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = mean_loss(logits, lay_out(targets))
        loss.backward()
        seen += [logits, loss]
        if step == 0:
            seen += [param.grad for param in model.parameters()]
        optimizer.step()
    return [whole(tensor) for tensor in [*seen, *model.parameters()]]


def whole(tensor: Tensor) -> Tensor:
    """A copy of the plain tensor that a distributed one stands for. Collective over its mesh."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
