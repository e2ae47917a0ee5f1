"""Programs as users write them, 20 that are right and 20 with a fault, and where that is.

Each is what `mpisgd.verify` takes: a model, an optimizer, a loss, and options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import mpisgd

FEATURES, HIDDEN, OUTPUTS, EXAMPLES, LENGTH, WORDS = 6, 8, 3, 12, 4, 10


class Program(NamedTuple):
    """What is trained.

    `data`: makes a batch of a generator; `module`: where the fault is, None where there is none.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    data: Callable[[torch.Generator], list[Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any]
    module: str | None = None


def numbers(draw: torch.Generator, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [
        torch.randn(EXAMPLES, FEATURES, generator=draw, dtype=torch.float64).to(dtype),
        torch.randn(EXAMPLES, OUTPUTS, generator=draw, dtype=torch.float64).to(dtype),
    ]


def images(draw: torch.Generator) -> list[Tensor]:
    inputs = torch.randn(EXAMPLES, 2, 5, 5, generator=draw, dtype=torch.float64)
    return [inputs, torch.randint(OUTPUTS, (EXAMPLES,), generator=draw)]


def words(draw: torch.Generator) -> list[Tensor]:
    return [torch.randint(WORDS, (EXAMPLES, LENGTH), generator=draw) for _ in range(2)]


def squares(net: Any, batch: Any) -> Tensor:
    return functional.mse_loss(net(batch[0]), batch[1])


def classes(net: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(net(batch[0]), batch[1])


def next_words(net: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


def groups(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": params[2:][::-1], "lr": 0.02}, {"params": params[:2]}], lr=0.1)


def mlp(*between: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers = (nn.Linear(FEATURES, HIDDEN), *between, nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
    return nn.Sequential(*layers).to(dtype)


def cnn(norm: Callable[[int], nn.Module] = lambda n: nn.GroupNorm(2, n)) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, OUTPUTS))
    ).double()


class Residual(nn.Module):
    """A block as in ResNet."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 2, 3, padding=1), norm(2), nn.Linear(50, OUTPUTS)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + torch.relu(self.norm(self.conv(x)))).flatten(1))


class Tagger(nn.Module):
    """An LSTM, whose second dimension is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(WORDS, 6), nn.LSTM(6, 5), nn.Linear(5, WORDS)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x).transpose(0, 1))[0].transpose(0, 1))


class TinyGpt(nn.Module):
    """An encoder layer between a table and its transpose: tied weights, and an output in a dict."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        if tied:
            self.head.weight = self.table.weight
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.layer(self.table(x)))}


def next_logits(net: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(net(batch[0])["logits"].flatten(0, 1), batch[1].flatten())


class Partly(nn.Module):
    """A frozen bias, a module that is not used, and a weight of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, OUTPUTS)
        self.unused = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def in_bfloat16(net: Any, batch: Any) -> Tensor:
    return squares(net, [part.bfloat16() for part in batch])


def in_float32(net: Any, batch: Any) -> Tensor:
    return squares(net, [part.float() for part in batch])


RIGHT = {
    "multilayer perceptron": Program(mlp, squares, numbers, sgd, {}),
    "AdamW": Program(mlp, squares, numbers, adam, {}),
    "groups": Program(mlp, squares, numbers, groups, {}),
    "LBFGS": Program(mlp, squares, numbers, lbfgs, {}),
    "frozen, unused, tied": Program(Partly, squares, numbers, sgd, {}),
    "convolutions": Program(cnn, classes, images, sgd, {}),
    "residual": Program(lambda: Residual(lambda n: nn.GroupNorm(1, n)), classes, images, adam, {}),
    "LSTM": Program(Tagger, next_words, words, sgd, {}),
    "GPT": Program(TinyGpt, next_logits, words, adam, {}),
    "GPT, shared parameters": Program(TinyGpt, next_logits, words, adam, {"share_parameters": True}),
    "sums": Program(mlp, squares, numbers, sgd, {"op": mpisgd.ReduceOp.SUM}),
    "sums by name": Program(mlp, squares, numbers, sgd, {"op": "sum"}),
    "Adasum": Program(mlp, squares, numbers, sgd, {"op": mpisgd.Adasum}),
    "bfloat16": Program(lambda: mlp(dtype=torch.bfloat16), in_bfloat16, numbers, sgd, {}),
    "float32": Program(lambda: mlp(dtype=torch.float32), in_float32, numbers, sgd, {}),
    "Sharded(1)": Program(TinyGpt, next_logits, words, adam, {"strategy": mpisgd.Sharded(1)}),
    "Sharded(2)": Program(mlp, squares, numbers, adam, {"strategy": mpisgd.Sharded(2)}),
    "LocalSGD": Program(cnn, classes, images, sgd, {"strategy": mpisgd.LocalSGD(2)}),
    "DiLoCo": Program(mlp, squares, numbers, adam, {"strategy": mpisgd.DiLoCo(2)}),
    "layer normalization": Program(lambda: mlp(nn.LayerNorm(HIDDEN)), squares, numbers, sgd, {}),
}


# -- faults ------------------------------------------------------------------------------------------


def is_alone() -> bool:
    """Whether this rank is one with a fault: all but the first, in a training by all ranks."""
    return mpisgd.rank() > 0


class Training:
    """Whether what runs is the training by all ranks: its batches are shares."""

    @staticmethod
    def is_on(x: Tensor) -> bool:
        return len(x) < EXAMPLES


class Scaled(nn.Module):
    """Multiplies by another number on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.1 * mpisgd.rank() * Training.is_on(x))


class Centred(nn.Module):
    """Subtracts the mean of the examples that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Softmax(nn.Module):
    """A softmax over the wrong dimension: that of the examples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 0)


class Positions(nn.Module):
    """Adds the number of the example, as a model that takes the batch for the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.arange(len(x)).unsqueeze(1)


class Between(nn.Module):
    """Its own code is wrong, between two modules that are right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) / x.norm())


class Detached(nn.Module):
    """Stops the gradient on some ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + 0.0 * x if Training.is_on(x) and is_alone() else 1.0 * x


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.alone = Training.is_on(x) and is_alone()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (0.5 if ctx.alone else 1.0)


class WrongBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _WrongBackward.apply(x)


class Noisy(nn.Module):
    """Its noise is seeded by the rank."""

    def forward(self, x: Tensor) -> Tensor:
        seed = torch.Generator().manual_seed(mpisgd.rank() if Training.is_on(x) else 0)
        return x + torch.randn(x.shape[1:], generator=seed, dtype=x.dtype)


class KWinners(nn.Module):
    """Keeps the largest activations of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= x.flatten().topk(x.numel() // 2).values[-1], x, torch.zeros_like(x))


class Clipped(nn.Module):
    """Clips by the largest number of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max().clamp(min=1e-3)


class Hooked(nn.Linear):
    """Somebody has left a hook on its weight, on some ranks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        if is_alone():
            self.weight.register_hook(lambda grad: grad * 0.5)


def sum_of_squares(net: Any, batch: Any) -> Tensor:
    return functional.mse_loss(net(batch[0]), batch[1], reduction="sum")


def contrastive(net: Any, batch: Any) -> Tensor:
    """The negatives are the other examples that a rank has."""
    out = functional.normalize(net(batch[0]))
    return functional.cross_entropy(out @ batch[1].T, torch.arange(len(out)))


def decayed(net: Any, batch: Any) -> Tensor:
    """The penalty counts once per rank and was divided by the number of them."""
    penalty = sum(param.square().sum() for param in net.parameters())
    return squares(net, batch) + 0.1 * penalty / (EXAMPLES / len(batch[0]))


class OnlyTheFirst(mpisgd.Strategy):
    """A strategy of one's own that forgets the last two parameters."""

    def synchronizer(self, training: Any) -> Any:
        return _Averager(training)


class _Averager(mpisgd.Synchronizer):
    def after_step(self, num_steps: int) -> None:
        params = [param.detach() for _, param in self.training.named]
        mpisgd.all_reduce_coalesced(params[:-2], mpisgd.ReduceOp.AVG, self.training.group)


def with_fault(module: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: mlp(module())


FORGETS = {"strategy": OnlyTheFirst(), "definition": mpisgd.LocalSGD(1)}
WRONG = {
    "batch normalization": Program(lambda: mlp(nn.BatchNorm1d(HIDDEN)), squares, numbers, sgd, {}, "1"),
    "batch normalization 2d": Program(lambda: cnn(nn.BatchNorm2d), classes, images, sgd, {}, "1"),
    "in a residual": Program(lambda: Residual(nn.BatchNorm2d), classes, images, adam, {}, "norm"),
    "scaled by rank": Program(with_fault(Scaled), squares, numbers, sgd, {}, "1"),
    "centred": Program(with_fault(Centred), squares, numbers, sgd, {}, "1"),
    "softmax over examples": Program(with_fault(Softmax), squares, numbers, adam, {}, "1"),
    "numbers of examples": Program(with_fault(Positions), squares, numbers, sgd, {}, "1"),
    "code between modules": Program(with_fault(Between), squares, numbers, sgd, {}, "1"),
    "detached": Program(with_fault(Detached), squares, numbers, sgd, {}, "1"),
    "backward": Program(with_fault(WrongBackward), squares, numbers, sgd, {}, "1"),
    "noise": Program(with_fault(Noisy), squares, numbers, sgd, {}, "1"),
    "k winners": Program(with_fault(KWinners), squares, numbers, sgd, {}, "1"),
    "clipped": Program(with_fault(Clipped), squares, numbers, sgd, {}, "1"),
    "clipped in float32": Program(
        lambda: mlp(Clipped(), dtype=torch.float32), in_float32, numbers, sgd, {}, "1"
    ),
    "a hook": Program(lambda: mlp(Hooked(HIDDEN, HIDDEN)), squares, numbers, sgd, {}, "1"),
    "a hook, with AdamW": Program(lambda: mlp(Hooked(HIDDEN, HIDDEN)), squares, numbers, adam, {}, "1"),
    "a sum, not a mean": Program(mlp, sum_of_squares, numbers, sgd, {}, ""),
    "a contrastive loss": Program(mlp, contrastive, numbers, sgd, {}, ""),
    "a penalty": Program(mlp, decayed, numbers, sgd, {}, ""),
    "a strategy": Program(mlp, squares, numbers, sgd, FORGETS, "2"),
}
