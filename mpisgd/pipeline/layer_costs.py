"""`measure_layers`: how long each layer of a model takes, and how many bytes it sends and has."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.skips import stashing

__all__ = ["LayerCost", "costs_table", "measure_layers"]


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one micro-batch.

    Attributes:
        name: name within its model.
        forward_s: median time of the forward pass.
        backward_s: median time of the backward pass.
        activation_bytes: bytes of its output.
        parameter_bytes: bytes of its parameters.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int

    @property
    def time_s(self) -> float:
        """The time of both passes."""
        return self.forward_s + self.backward_s


def measure_layers(
    module: nn.Sequential, *inputs: Tensor, repetitions: int = 5, warm_up: int = 1
) -> tuple[LayerCost, ...]:
    """Measure the costs of each layer, for inputs of the size of a micro-batch.

    Times differ between ranks: use those of one rank on all, by `mpisgd.broadcast_object`. Gradients of the
    parameters are dropped. Layers that change their input in place get a copy of it.

    Args:
        module: a sequence of layers.
        inputs: inputs of the first layer.
        repetitions: number of measurements of each pass, of which the median is used.
        warm_up: number of passes before the first measurement.

    Raises:
        InvalidArgument: `module` is not an nn.Sequential.
    """
    if not isinstance(module, nn.Sequential):
        raise InvalidArgument(
            f"measure_layers: module is a {type(module).__name__}; expected an nn.Sequential"
        )
    check_positive("measure_layers", "repetitions", repetitions, whole=True)
    costs, tensors, kept = [], tuple(inputs), dict[str, Tensor]()
    for name, layer in module.named_children():
        rounds = []
        for _ in range(warm_up + repetitions):
            with stashing(dict(kept)) as stashed:
                rounds.append(_one_round(layer, tensors))
        tensors = rounds[-1].output
        kept = {name: tensor.detach() for name, tensor in stashed.items()}
        costs.append(
            LayerCost(
                name,
                statistics.median(each.forward_s for each in rounds[warm_up:]),
                statistics.median(each.backward_s for each in rounds[warm_up:]),
                sum(tensor.nbytes for tensor in tensors),
                sum(param.nbytes for param in layer.parameters()),
            )
        )
    module.zero_grad()
    return tuple(costs)


def costs_table(layers: Sequence[LayerCost]) -> str:
    """Return the costs as a table of text."""
    lines = ["layer                     forward ms  backward ms  activation MB  parameter MB"]
    lines += [
        f"{each.name:24.24}  {1e3 * each.forward_s:10.3f}  {1e3 * each.backward_s:11.3f}  "
        f"{each.activation_bytes / 1e6:13.3f}  {each.parameter_bytes / 1e6:12.3f}"
        for each in layers
    ]
    return "\n".join(lines)


@dataclass
class _Round:
    output: tuple[Tensor, ...]
    forward_s: float
    backward_s: float


def _one_round(layer: nn.Module, inputs: Sequence[Tensor]) -> _Round:
    floating = [tensor.is_floating_point() or tensor.is_complex() for tensor in inputs]
    leaves = [
        tensor.detach().clone().requires_grad_(is_floating)
        for tensor, is_floating in zip(inputs, floating, strict=True)
    ]
    # Not a leaf: one that requires a gradient cannot be changed in place.
    given = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]
    begin = _now(leaves)
    output: Any = layer(*given)
    outputs = output if isinstance(output, tuple) else (output,)
    middle = _now(outputs)
    grown = [tensor for tensor in outputs if tensor.requires_grad]
    if grown:
        torch.autograd.backward(grown, [torch.ones_like(tensor) for tensor in grown])
    return _Round(tuple(tensor.detach() for tensor in outputs), middle - begin, _now(outputs) - middle)


def _now(tensors: Sequence[Tensor]) -> float:
    """Return the time, once what was started on a GPU is done."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return time.perf_counter()
