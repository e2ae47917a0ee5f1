"""`DistributedOptimizer(op=Adasum)`: every rank steps by itself, and the steps are added adaptively.

Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation".
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.gradients import ExchangeOptions
from mpisgd.horovod.ops.allreduce import grouped_allreduce_async_
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.reduce_ops import Adasum
from mpisgd.horovod.process_sets import serial_of_new
from mpisgd.job import rank_info
from mpisgd.optim.step_hooks import register_step_hooks

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to the wrapped class so that ranks combine their steps."""

    def _set_up(
        self, named: Sequence[tuple[str, Tensor]], _: object, passes: int, options: ExchangeOptions
    ) -> None:
        self._parameter_names = {param: name for name, param in named}
        self._options = options
        self._label = f"adasum.{serial_of_new(options.process_set)}"
        self.backward_passes_per_step = passes
        self._begun_at: list[Tensor] = []
        register_step_hooks(self, _remember, _combine)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Take note of how many `backward()`s make a step; gradients are summed locally in any case."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: what is combined are the steps, not the gradients."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuse: there is nothing that could be skipped."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield


def _trained(optimizer: AdasumOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]


def _remember(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    assert isinstance(optimizer, AdasumOptimizer)
    optimizer._begun_at = [param.detach().clone() for param in _trained(optimizer)]


@torch.no_grad()
def _combine(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    """Replace this rank's step by the adaptive sum of everyone's."""
    assert isinstance(optimizer, AdasumOptimizer)
    begun_at, optimizer._begun_at = optimizer._begun_at, []
    process_set, compression = optimizer._options.process_set, optimizer._options.compression
    if rank_info.size() == 1 or not process_set.included() or not begun_at:
        return
    params = _trained(optimizer)
    pairs = [compression.compress(param - start) for param, start in zip(params, begun_at, strict=True)]
    wires = [wire for wire, _ in pairs]
    synchronize(grouped_allreduce_async_(wires, None, optimizer._label, Adasum, process_set=process_set))
    for param, start, (wire, context) in zip(params, begun_at, pairs, strict=True):
        param.copy_(start + compression.decompress(wire, context))
