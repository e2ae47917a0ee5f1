"""The model of a program: its parameters and the loss of a rank.

Values have a closed form, so that a program can be written down in a few lines, and differ by rank, by
micro-batch and by element. Where a program is exact they are small integers and the loss is linear, so
gradients do not depend on parameters and every order of additions gives the same; elsewhere each layer's part
of the loss depends on those before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpisgd.tools.verification.programs.events import SetGradient
from mpisgd.tools.verification.programs.program import Layer, Program

__all__ = ["Model", "is_used", "numbers"]


@lru_cache(maxsize=1024)  # each rank, the reference and the variants of a program compute the same losses
def numbers(shape: tuple[int, ...], key: int, *, exact: bool) -> Tensor:
    """Return numbers of a closed form: integers from -3 to 3, or between -1 and 1. float64, [*shape].

    Nobody writes to them.
    """
    i = torch.arange(math.prod(shape))
    if exact:
        return ((i * (i + key) + 5 * key) % 7 - 3).double().reshape(shape)
    # In float64 from the beginning: among float32 numbers of long parameters some are equal, and a method
    # that takes the largest takes whichever of those it likes. A square: cosines of a line make matrices of
    # rank 2, and a method that approximates those draws the rest of its basis from roundings.
    return torch.cos(i.double() * (i + key) * 0.7 + key).reshape(shape)


def is_used(layer: Layer, rank: int, size: int, data: int) -> bool:
    """Return whether the loss of a rank on a micro-batch contains a layer."""
    turn = data % size == rank
    return {
        "all": True,
        "none": False,
        "first": rank == 0,
        "last": rank == size - 1,
        "turns": turn,
        "others": not turn,
        "odd": data % 2 == 1,
    }[layer.used_by]


class Holder(nn.Module):
    """A module with one parameter: its forward is where that is read, and where something may wait for it."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.param = param

    def forward(self) -> Tensor:
        """Return the parameter."""
        return self.param


class Model:
    """Parameters, and the loss of a rank.

    Attributes:
        params: by layer.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.params = [_parameter(program, place) for place in range(len(program.layers))]
        self._holders = [Holder(param) for param in self.params]

    def loss(self, rank: int, data: int, layers: Collection[int]) -> Tensor | None:
        """Return a rank's loss of one micro-batch, a scalar; None where it contains no layer that trains."""
        program = self._program
        total: Tensor | None = None
        for place, layer in enumerate(program.layers):
            if place not in layers or not is_used(layer, rank, program.ranks, data):
                continue
            for use in range(layer.times):
                part = self._part_or_later(place, rank, data, use)
                if total is None:
                    total = part
                else:
                    total = total + part if program.exact else torch.tanh(total / 2 + part)
        return total if total is not None and total.requires_grad else None

    def gradient_for(self, event: SetGradient) -> Tensor | None:
        """Return the gradient that a program sets by itself: a new tensor, or None."""
        param = self.params[event.layer]
        values = numbers(tuple(param.shape), event.layer, exact=self._program.exact)
        return values.to(param.dtype, copy=True) if event.exists else None

    def _part_or_later(self, place: int, rank: int, data: int, use: int) -> Tensor:
        """Return the part of a layer; a recomputed one has a backward inside of the backward."""
        if not self._program.layers[place].recomputed or not self.params[place].requires_grad:
            return self._part(place, rank, data, use)
        begin = torch.zeros((), dtype=torch.float64, requires_grad=True)
        part: Tensor = checkpoint(
            lambda begin: self._part(place, rank, data, use) + begin,
            begin,
            use_reentrant=True,
            preserve_rng_state=False,
        )
        return part

    def _part(self, place: int, rank: int, data: int, use: int) -> Tensor:
        """Return the part of a layer: a scalar of its own dtype as float64."""
        layer, param, exact = self._program.layers[place], self._holders[place](), self._program.exact
        key = self._program.seed % 1000 + 31 * rank + 17 * data + 3 * place + 101 * use
        if layer.kind == "dense":
            factors = numbers(layer.shape, key, exact=exact).to(param.dtype)
            products = param * factors
        else:
            rows, width = layer.shape
            indices = (torch.arange(4) * (key % 3 + 1) + key) % rows
            is_sparse = layer.kind == "sparse" or (layer.kind == "partly sparse" and data % 2 == 0)
            factors = numbers((4, width), key, exact=exact).to(param.dtype)
            products = nn.functional.embedding(indices, param, sparse=is_sparse) * factors
        part: Tensor = products.sum().double()
        return part if exact else part / max(1, factors.numel())


def _parameter(program: Program, place: int) -> nn.Parameter:
    layer = program.layers[place]
    values = numbers(layer.shape, 1000 + place, exact=program.exact).to(getattr(torch, layer.dtype))
    if layer.transposed:
        values = values.t().contiguous().t()
    return nn.Parameter(values.clone(memory_format=torch.preserve_format), requires_grad=not layer.frozen)
