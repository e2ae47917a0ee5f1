"""`Task`: what the methods of a comparison train, and how good the model becomes: `Digits` and `Text`."""

import abc
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.methods.from_text import OptimizerChoice

__all__ = ["ByteGPT", "Digits", "Task", "Text", "sent_bytes"]


class Task(abc.ABC):
    """A model and its data, the same on all ranks; each trains on its part of a batch.

    A training has `num_parts` parts of equally many steps; after each the common model is evaluated.

    Attributes:
        name: in tables.
        measure: what is evaluated, and the name of the field of a row: "accuracy" or "loss".
        best: the function that returns the best of some, `max` or `min`.
        worst: the other one.
        optimizer: of methods that name none.
        num_parts: see above.
    """

    name: ClassVar[str]
    measure: ClassVar[str]
    best: ClassVar[Any]
    worst: ClassVar[Any]
    optimizer: OptimizerChoice
    num_parts: int

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """Return a new one, with weights by torch's generator."""

    @abc.abstractmethod
    def batches(self, seed: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's inputs and targets of each step of a part."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that is minimised."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Return how good a model is, that all ranks have. Collective."""

    def factor(self, part: int, step: int) -> float:
        """Return the factor of the learning rate in a step of a part, both counted from 0."""
        return 1.0


def sent_bytes() -> float:
    """Return the bytes that all hosts have sent so far, headers and other traffic included. Collective.

    0 where all ranks share a host.
    """
    mine = 0
    if mpisgd.num_nodes() > 1 and mpisgd.local_rank() == 0:
        counters = psutil.net_io_counters(pernic=True)
        mine = sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")
    total = torch.tensor(mine, dtype=torch.float64)
    mpisgd.all_reduce(total)
    return float(total)


NUM_CLASSES, TEST_SHARE = 10, 0.2
SGD = OptimizerChoice(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})


class Images(NamedTuple):
    """Images [n, 64] from 0 to 1, and labels [n]."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class Digits(Task):
    """1,797 digits of 8 x 8 pixels, shuffled once for all.

    Args:
        num_epochs: of each training.
        batch: images of a step, over all ranks.
        width: of the network's two hidden layers.

    Raises:
        JobError: there is no scikit-learn.
    """

    name, measure, best, worst = "digits", "accuracy", max, min

    def __init__(self, num_epochs: int, batch: int, width: int) -> None:
        self.num_parts, self.optimizer = num_epochs, SGD
        self._batch, self._width = batch, width
        self._images = _load()

    def model(self) -> nn.Module:
        """Return a network of two hidden layers."""
        width = self._width
        hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))

    def batches(self, seed: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's images of each batch of an epoch."""
        images, labels = self._images.train
        generator = torch.Generator().manual_seed(seed * self.num_parts + part)
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(order) - self._batch + 1, self._batch):
            mine = order[start + mpisgd.rank() : start + self._batch : mpisgd.size()]
            yield images[mine], labels[mine]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy."""
        return nn.functional.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the share of the test images that it gets right."""
        images, labels = self._images.test
        return float((model(images).argmax(1) == labels).double().mean())


def _load() -> Images:
    try:
        from sklearn import datasets
    except ImportError as exc:
        raise mpisgd.JobError(
            'bench strategies needs scikit-learn: pip install "mpisgd[demo]"', exit_code=2
        ) from exc
    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(np.asarray(images, np.float32) / 16)[order]
    y = torch.from_numpy(np.asarray(labels, np.int64))[order]
    cut = round(TEST_SHARE * len(y))
    return Images((x[cut:], y[cut:]), (x[:cut], y[:cut]))


ADAMW = OptimizerChoice(torch.optim.AdamW, {"lr": 0.003})
NUM_BYTES = 256  # that there are
CONTEXT, WIDTH, HEADS, DEPTH = 64, 64, 4, 2
TEXT_BYTES, VALIDATION_SEQUENCES = 2**21, 256
VALIDATION_SHARE = 16  # the last part of so many
WARM_UP, LAST_FACTOR = 0.1, 0.1
# Of the standard library: other people's packages, and tests that are data rather than programs.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class ByteGPT(nn.Module):
    """Bytes [n, length] in, for each place the logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_BYTES, bias=False)
        for embedding in (self.byte, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [n, length, NUM_BYTES]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.byte(tokens) + self.place.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Text(Task):
    """Sequences from random places of a text, of which rank 0 gives all the same bytes. Collective.

    Args:
        num_steps: of each training; divided evenly among the parts.
        num_parts: how often the model is evaluated.
        batch: sequences of a step, over all ranks.
    """

    name, measure, best, worst = "text", "loss", min, max

    def __init__(self, num_steps: int, num_parts: int, batch: int) -> None:
        self.num_parts, self.optimizer = num_parts, ADAMW
        self._steps, self._batch = num_steps // num_parts, batch
        text = torch.empty(TEXT_BYTES, dtype=torch.uint8)
        if mpisgd.rank() == 0:
            text.copy_(torch.frombuffer(bytearray(_standard_library()), dtype=torch.uint8))
        mpisgd.broadcast(text, src=0)
        cut = TEXT_BYTES - TEXT_BYTES // VALIDATION_SHARE
        self._train = text[:cut]
        self._validation = _sequences(text[cut:], VALIDATION_SEQUENCES, torch.Generator().manual_seed(0))

    def model(self) -> nn.Module:
        """Return a GPT of 137 thousand parameters."""
        return ByteGPT()

    def batches(self, seed: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's sequences of each step."""
        generator = torch.Generator().manual_seed(1 + seed * self.num_parts + part)
        for _ in range(self._steps):
            mine = _sequences(self._train, self._batch, generator)[mpisgd.rank() :: mpisgd.size()]
            yield mine[:, :-1], mine[:, 1:]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of a byte, in natural units."""
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the loss on the validation sequences, of which each rank looks at a share."""
        mine = self._validation[mpisgd.rank() :: mpisgd.size()]
        loss = self.loss(model, mine[:, :-1], mine[:, 1:])
        total = torch.tensor([float(loss) * len(mine), len(mine)], dtype=torch.float64)
        mpisgd.all_reduce(total)
        return float(total[0] / total[1])

    def factor(self, part: int, step: int) -> float:
        """Return the part of the learning rate; see above."""
        done = (part * self._steps + step + 1) / (self.num_parts * self._steps)
        falling = 0.5 + 0.5 * math.cos(math.pi * max(0.0, done - WARM_UP) / (1 - WARM_UP))
        return min(1.0, done / WARM_UP) * (LAST_FACTOR + (1 - LAST_FACTOR) * falling)


def _sequences(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return [count, CONTEXT + 1] bytes, as int64, from random places."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def _standard_library() -> bytes:
    """Return TEXT_BYTES of Python's sources, in the same order on every machine."""
    library, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(path.relative_to(library) for path in library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.parts):
            text += (library / path).read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return bytes(text[:TEXT_BYTES]).ljust(TEXT_BYTES, b"\n")
