"""The training steps that are compared: three models, and one step of each, checked against one process.

Every rank trains on a fixed batch of its own. After a step with averaged gradients the parameters must be
those of one process that saw the batches of all ranks joined.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.tools.bench.measure import OnDevice, WrongResult

__all__ = ["MODELS", "OPTIMIZERS", "StepTask", "Training"]

MIB = 2**20
LEARNING_RATE = 0.01
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
NUM_CLASSES = 10
SEQUENCE = 32
# Of the length of a parameter's change (other summation order), and of the parameter's own (rounding).
CHANGE_TOLERANCE = 0.02
ROUNDING = 4e-7


@dataclass(frozen=True)
class StepTask:
    """What to train.

    Attributes:
        model: one of MODELS.
        batch: examples of one rank.
        size: number of ranks.
        small: a miniature of the model, for a quick look.
        set_to_none: how gradients are reset.
        bucket_bytes: for frameworks that are told.
        communicates: whether gradients are averaged at all.
        sharded: whether each rank keeps a part of each parameter only; for torch.
        joined: whether one process trains on the batches of all ranks.
        optimizer: one of OPTIMIZERS.
        device: what torch calls the kind of device that it is trained on.
    """

    model: str
    batch: int
    size: int
    small: bool = False
    set_to_none: bool = True
    bucket_bytes: int = 25 * MIB
    communicates: bool = True
    sharded: bool = False
    joined: bool = False
    optimizer: str = "sgd"
    device: str = "cpu"

    def common(self) -> "StepTask":
        """Return the task without what does not change its result."""
        where = self.device
        return StepTask(self.model, self.batch, self.size, self.small, optimizer=self.optimizer, device=where)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model, not distributed."""
        return OPTIMIZERS[self.optimizer](model.parameters(), lr=LEARNING_RATE)


class DeepNarrow(nn.Module):
    """Many small layers around a residual path: what counts is the number of tensors."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        return x[:, :NUM_CLASSES]


class LanguageModel(nn.Module):
    """A transformer encoder between an embedding and a projection back to tokens."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)  # type: ignore[no-any-return]


def mlp(inputs: int, width: int) -> nn.Module:
    """Return a few large layers: what counts is the number of bytes."""
    widths = [inputs, width, width, width]
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))


# Each is made at its full size, or as a miniature.
MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "mlp": lambda small: mlp(32, 64) if small else mlp(1024, 3072),
    "deep": lambda small: DeepNarrow(20, 16) if small else DeepNarrow(302, 64),
    "transformer": lambda small: LanguageModel(64, 16, 2) if small else LanguageModel(8192, 256, 6),
}


def build(task: StepTask) -> nn.Module:
    """Return the model, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MODELS[task.model](task.small)


def examples(task: StepTask, rank: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one rank, or of all ranks where they are joined."""
    if task.joined:
        batches = [examples(replace(task, joined=False), rank) for rank in range(task.size)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        return inputs, targets
    generator = torch.Generator().manual_seed(1000 + rank)
    with torch.device("meta"):  # only its shape is asked for
        model = MODELS[task.model](task.small)
    if isinstance(model, LanguageModel):
        vocabulary = model.embedding.num_embeddings
        tokens = torch.randint(vocabulary, (task.batch, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
    width = next(model.parameters()).shape[1]
    targets = torch.randint(NUM_CLASSES, (task.batch,), generator=generator)
    return torch.randn(task.batch, width, generator=generator), targets


class Training(OnDevice):
    """A model, its optimizer and the batch of one rank.

    Attributes:
        model: fresh.
        forward: the model, or what wraps it.
        optimizer: of the task; plain SGD, whose few passes over the parameters hide no communication.
    """

    def __init__(self, task: StepTask, rank: int) -> None:
        super().__init__(task.device)
        self.task = task
        self.model = build(task).to(task.device)
        self.forward = self.model
        self.optimizer = task.make_optimizer(self.model)
        self.inputs, self.targets = (tensor.to(task.device) for tensor in examples(task, rank))

    def distribute(self, wrapper: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        """Wrap the optimizer in one that averages gradients, such as `mpisgd.DistributedOptimizer`."""
        named = self.model.named_parameters()
        self.optimizer = wrapper(self.optimizer, named_parameters=named, **options)

    def step(self) -> None:
        """Take one step."""
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        """Take the part of a step that leaves gradients behind."""
        self.zero_grad()
        loss = nn.functional.cross_entropy(self.forward(self.inputs), self.targets)
        loss.backward()  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad(set_to_none=self.task.set_to_none)

    @torch.no_grad()
    def reset(self) -> None:
        """Go back to the first parameters; see `Subject`."""
        for param, first in zip(self.model.parameters(), _reference(self.task.common())[0], strict=True):
            param.copy_(_like(param, first))

    @torch.no_grad()
    def verify(self) -> None:
        """See `Subject`: with communication, parameters are what one process has after its first step."""
        if not self.task.communicates:
            return
        before, after = _reference(self.task.common())
        for i, (param, first, wanted) in enumerate(zip(self.model.parameters(), before, after, strict=True)):
            error, change = (_whole(param) - wanted).norm(), (wanted - first).norm()
            if not bool(error <= CHANGE_TOLERANCE * change + ROUNDING * wanted.norm()):
                raise WrongResult(
                    f"parameter {i} of {self.task.model} is off by {float(error):.3g} after one step, in "
                    f"which it should have changed by {float(change):.3g}"
                )


def _whole(param: Any) -> Any:
    """Return all of a parameter, of which this rank may have a shard. Collective, then."""
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def _like(param: Any, value: Tensor) -> Tensor:
    """Return this rank's part of `value`, if that is what it has of `param`."""
    if not hasattr(param, "full_tensor"):
        return value
    # Imported here only: it takes memory, which `bench memory` measures.
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


@functools.lru_cache(maxsize=1)
@torch.enable_grad()
def _reference(task: StepTask) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters before and after one step of one process on the joined batch."""
    training = Training(replace(task, joined=True), 0)
    before = [param.detach().clone() for param in training.model.parameters()]
    training.step()
    return before, [param.detach() for param in training.model.parameters()]
