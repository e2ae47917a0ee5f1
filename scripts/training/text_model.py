"""A GPT on bytes: the model that `train_text.py` trains, written as for one process.

Three things in it are there for those who divide it: a part that is None is passed over (a stage of a
pipeline has only some of the parts), attention reads its number of heads off what its projections return
(with tensor parallelism they return those of this rank), and bytes may be told where they stand (with
context parallelism they are some of a sequence's).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256  # bytes
INITIAL_STD = 0.02


@dataclass(frozen=True)
class ModelSize:
    """What decides the shapes of the parameters. `context` is the number of bytes the model can look at."""

    num_layers: int
    num_heads: int
    dim: int
    context: int


class Attention(nn.Module):
    """Each byte looks at those before it."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_dim = size.dim // size.num_heads
        self.query = nn.Linear(size.dim, size.dim, bias=False)
        self.key = nn.Linear(size.dim, size.dim, bias=False)
        self.value = nn.Linear(size.dim, size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        heads = [self._split_heads(project(x)) for project in (self.query, self.key, self.value)]
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(start_dim=2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """[batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two layers, applied to each position by itself."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    """One layer of the GPT; with `checkpointed` it keeps its input alone, and computes the rest twice."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.dim)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.dim)
        self.feed_forward = FeedForward(size)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self._add_layers, x, use_reentrant=False)
        return self._add_layers(x)

    def _add_layers(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embedding(nn.Module):
    """What a byte is, plus where it stands."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, size.dim)
        self.position = nn.Embedding(size.context, size.dim)
        self.places: Tensor | None = None  # from the first one on

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] to [batch, length, dim]."""
        if self.places is not None:
            return self.byte(tokens) + self.position(self.places[: tokens.shape[1]])
        return self.byte(tokens) + self.position.weight[: tokens.shape[1]]


class GPT(nn.Module):
    """Bytes in, for each position the logits of the next byte out. Each of its three parts may be missing."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding: nn.Module | None = Embedding(size)
        # By name, not in a list: a block keeps its name where those before it are elsewhere.
        self.blocks = nn.ModuleDict({str(number): Block(size) for number in range(size.num_layers)})
        self.head: nn.Module | None = nn.Sequential(
            nn.LayerNorm(size.dim), nn.Linear(size.dim, VOCABULARY, bias=False)
        )

    def number_places(self) -> Tensor:
        """The places of a sequence, [context], which the model looks at from now on; it may be divided."""
        self.embedding.places = torch.arange(self.embedding.position.num_embeddings)
        return self.embedding.places

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length] bytes, or what the stage before this one returned, to logits or to such again."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def build_model(size: ModelSize, seed: int) -> GPT:
    """The whole model, the same for the same seed.

    What is added to the residual stream starts smaller, the more layers add to it.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    torch.manual_seed(seed)
    model = GPT(size)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            adds = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            nn.init.normal_(parameter, std=INITIAL_STD / (2 * size.num_layers) ** (0.5 * adds))
    return model


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes of the natural logarithm of how improbable the right one was."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
