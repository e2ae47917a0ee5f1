"""`Model`: layers' sizes and operations; `StepProfile`: when the gradients of a step are ready.

forward  | layer 1 | layer 2 | layer 3 |
backward                               |   layer 3   |   layer 2   |   layer 1   | optimizer |
gradients ready                                      ^             ^             ^
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mpisgd.arguments import check_positive, shown
from mpisgd.errors import InvalidArgument
from mpisgd.layouts.named_model import NamedModel
from mpisgd.tools.plan.cluster import Cluster, check_not_negative
from mpisgd.tools.plan.models.blocks import Block

__all__ = [
    "MOST_LAYERS",
    "OPTIMIZERS",
    "Gradient",
    "Layer",
    "Model",
    "OptimizerCost",
    "StepProfile",
    "blocks_of",
    "profile_of",
]

Shape = tuple[int, ...]
# A product of matrices forward is two of the same size backward: for the input, and for the weights.
BACKWARD = 2.0
MOST_LAYERS = 10**4  # more than that is mistyped, and would take hours to plan


class OptimizerCost(NamedTuple):
    """What an optimizer keeps and moves for each parameter, in elements.

    Attributes:
        state: that it keeps.
        moved: that a step reads and writes, gradient and parameter included.
    """

    state: int
    moved: int


OPTIMIZERS = {
    "sgd": OptimizerCost(0, 3),
    "momentum": OptimizerCost(1, 6),
    "adam": OptimizerCost(2, 7),
    "adamw": OptimizerCost(2, 7),
}


@dataclass(frozen=True)
class Layer:
    """A layer, in the order of the forward pass.

    Attributes:
        name: of it.
        shapes: of its parameters, in the order in which the optimizer has them.
        flops: of the forward pass, for one example.
        activation_bytes: what is kept for the backward pass, for one example.
        output_bytes: what goes to the next layer, for one example.
        all_reduces: see `Block`.
        block: the name of the part of the model that a pipeline does not cut; "": the layer itself.
        key_bytes: of the keys and values of attention, for one example.
        attention_flops: of them, those of the products with keys and values.
    """

    name: str
    shapes: tuple[Shape, ...]
    flops: float
    activation_bytes: float = 0.0
    output_bytes: float = 0.0
    all_reduces: int = 0
    block: str = ""
    key_bytes: float = 0.0
    attention_flops: float = 0.0

    def __post_init__(self) -> None:
        numbers = ("flops", "activation_bytes", "output_bytes", "all_reduces", "key_bytes", "attention_flops")
        for name in numbers:
            check_not_negative(f"layer {self.name}", name, getattr(self, name))
        if self.attention_flops > self.flops:
            raise InvalidArgument(
                f"layer {self.name}: attention_flops={self.attention_flops:g} of {self.flops:g}"
            )
        for shape in self.shapes:
            if not all(isinstance(length, int) and length >= 0 for length in shape):
                raise InvalidArgument(f"layer {self.name}: shape {shown(shape)}; expected numbers")

    @property
    def numel(self) -> int:
        """Parameters of the layer."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Model:
    """A model as far as its step's time and memory are concerned.

    Attributes:
        name: for tables.
        layers: in the order of the forward pass.
        itemsize: bytes of a parameter and of its gradient.
        named: the same with the names of its dimensions, for layouts.
    """

    name: str
    layers: tuple[Layer, ...]
    itemsize: int = 4
    named: NamedModel | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive(f"model {self.name}", "itemsize", self.itemsize, whole=True)
        if not any(layer.numel for layer in self.layers):
            raise InvalidArgument(f"model {self.name}: it has no parameters")

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(layer.numel for layer in self.layers)


class Gradient(NamedTuple):
    """A parameter's gradient.

    Attributes:
        name: of the parameter.
        place: of the parameter in the optimizer's list.
        shape: of it.
        itemsize: bytes of an element.
        ready_s: when it is complete, in seconds since the step has begun.
    """

    name: str
    place: int
    shape: Shape
    itemsize: int
    ready_s: float

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class StepProfile:
    """One step of one rank without communication.

    Attributes:
        name: of the model.
        batch: examples of the rank.
        forward_s: until backward begins.
        backward_s: from the beginning to the end of backward.
        optimizer_s: of the update of all parameters.
        gradients: in the order in which they become ready.
        optimizer: which one, of OPTIMIZERS.
        activation_bytes: what is kept for the backward pass at most.
        blocks: of the model, in the order of the forward pass; none: not known.
        named: the model with the names of its dimensions, for layouts; it is not written to files.
    """

    name: str
    batch: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients: tuple[Gradient, ...]
    optimizer: str = "sgd"
    activation_bytes: float = 0.0
    blocks: tuple[Block, ...] = ()
    named: NamedModel | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "optimizer_s", "activation_bytes"):
            check_not_negative("StepProfile", name, getattr(self, name))
        check_positive("StepProfile", "batch", self.batch)
        check_optimizer(self.optimizer)

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, which are those of all parameters."""
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimizer's state, in the dtype of the parameters."""
        return float(OPTIMIZERS[self.optimizer].state * self.nbytes)

    def slower(self, factor: float) -> "StepProfile":
        """Return the profile with forward and backward so many times as long."""
        gradients = tuple(each._replace(ready_s=each.ready_s * factor) for each in self.gradients)
        forward_s, backward_s = self.forward_s * factor, self.backward_s * factor
        blocks = tuple(block.slower(factor) for block in self.blocks)
        return replace(self, gradients=gradients, forward_s=forward_s, backward_s=backward_s, blocks=blocks)

    def with_blocks_of(self, model: Model, fixed_s: float = 0.0, divided_s: float = 0.0) -> "StepProfile":
        """Return the profile with the blocks of a model, whose times are divided as its operations are.

        Args:
            model: of the same parameters.
            fixed_s: of forward and backward, what does not depend on the number of examples.
            divided_s: what both take besides where tensor parallelism divides the model.

        Raises:
            InvalidArgument: the model has another number of parameters.
        """
        if model.numel != self.numel:
            raise InvalidArgument(
                f"plan: {model.name} has {model.numel:,} parameters, the step of {self.name} {self.numel:,}"
            )
        share = sum(layer.flops for layer in model.layers)
        times = [layer.flops / share if share else 0.0 for layer in model.layers]
        forward = [self.forward_s * each for each in times]
        backward = [self.backward_s * each for each in times]
        found = blocks_of(model, self.batch, forward, backward)
        both_s = max(1e-12, self.compute_s)
        shares = [(block.forward_s + block.backward_s) / both_s for block in found]
        blocks = [
            replace(block, fixed_s=fixed_s * share, divided_s=divided_s * share)
            for block, share in zip(found, shares, strict=True)
        ]
        return replace(self, blocks=tuple(blocks), named=model.named)


def check_optimizer(name: str) -> None:
    """Raise InvalidArgument unless an optimizer is known."""
    if name not in OPTIMIZERS:
        raise InvalidArgument(f"plan: optimizer={shown(name)}; expected one of {', '.join(OPTIMIZERS)}")


def profile_of(model: Model, cluster: Cluster, batch: int, optimizer: str = "sgd") -> StepProfile:
    """Return the step of a model on a rank that is known by its operations per second.

    Raises:
        InvalidArgument: the cluster does not say how many.
    """
    check_positive("plan", "batch", batch, whole=True)
    check_optimizer(optimizer)
    if cluster.flops_per_s is None:
        raise InvalidArgument("plan: the cluster needs `flops`, of a rank, or the step has to be measured")
    forward = [layer.flops * batch / cluster.flops_per_s for layer in model.layers]
    backward_s, gradients = _backward(model, sum(forward), [BACKWARD * seconds for seconds in forward])
    moved = OPTIMIZERS[optimizer].moved * model.numel * model.itemsize
    return StepProfile(
        name=model.name,
        batch=batch,
        forward_s=sum(forward),
        backward_s=backward_s,
        optimizer_s=moved / cluster.memory_bytes_per_s,
        gradients=gradients,
        optimizer=optimizer,
        activation_bytes=sum(layer.activation_bytes for layer in model.layers) * batch,
        blocks=blocks_of(model, batch, forward, [BACKWARD * seconds for seconds in forward]),
        named=model.named,
    )


def blocks_of(
    model: Model, batch: float, forward: Sequence[float], backward: Sequence[float]
) -> tuple[Block, ...]:
    """Return the blocks of a model, from what its layers take."""
    both = zip(model.layers, forward, backward, strict=True)
    groups = itertools.groupby(both, key=lambda each: each[0].block or each[0].name)
    return tuple(_block(name, batch, list(group)) for name, group in groups)


def _block(name: str, batch: float, group: Sequence[tuple[Layer, float, float]]) -> Block:
    layers, forward, backward = zip(*group, strict=True)
    flops = sum(layer.flops for layer in layers)
    return Block(
        name,
        tuple(shape for layer in layers for shape in layer.shapes),
        sum(forward),
        sum(backward),
        layers[-1].output_bytes * batch,
        sum(layer.activation_bytes for layer in layers) * batch,
        sum(layer.all_reduces for layer in layers),
        key_bytes=sum(layer.key_bytes for layer in layers) * batch,
        attention=sum(layer.attention_flops for layer in layers) / flops if flops else 0.0,
    )


def _backward(model: Model, start_s: float, seconds: Sequence[float]) -> tuple[float, tuple[Gradient, ...]]:
    """Return the seconds of backward, and the gradients: the last layer's first, each at its layer's end."""
    firsts, index = [], 0
    for layer in model.layers:
        firsts.append(index)
        index += len(layer.shapes)
    found, now = [], start_s
    for place in reversed(range(len(model.layers))):
        layer, now = model.layers[place], now + seconds[place]
        for number in reversed(range(len(layer.shapes))):
            name = f"{layer.name}.{number}"
            found.append(Gradient(name, firsts[place] + number, layer.shapes[number], model.itemsize, now))
    return now - start_s, tuple(found)
