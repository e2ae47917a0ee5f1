"""`DistributedOptimizer(op=Adasum)`: every rank steps by itself, and the steps are added adaptively.

Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation".
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.compression import Compressor
from mpisgd.horovod.ops.allreduce import grouped_allreduce_async_
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.reduce_ops import Adasum
from mpisgd.horovod.process_sets import ProcessSet
from mpisgd.job import rank_info

__all__ = ["adasum_optimizer"]


def adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    named: Sequence[tuple[str, Tensor]],
    compression: type[Compressor],
    passes: int,
    process_set: ProcessSet,
) -> torch.optim.Optimizer:
    """Turn `optimizer` into one whose steps are combined over the ranks by Adasum."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_AdasumOptimizer, kind), {})
    assert isinstance(optimizer, _AdasumOptimizer)
    optimizer._set_up(named, compression, passes, process_set)
    return optimizer


class _AdasumOptimizer(torch.optim.Optimizer):
    """What is added to the wrapped class."""

    def _set_up(
        self,
        named: Sequence[tuple[str, Tensor]],
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        self._parameter_names = {param: name for name, param in named}
        self._compression = compression
        self._process_set = process_set
        self.backward_passes_per_step = passes
        self._begun_at: list[Tensor] = []
        self.register_step_pre_hook(_remember)
        self.register_step_post_hook(_combine)

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


def _trained(optimizer: _AdasumOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]


def _remember(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    assert isinstance(optimizer, _AdasumOptimizer)
    optimizer._begun_at = [param.detach().clone() for param in _trained(optimizer)]


@torch.no_grad()
def _combine(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    """Replace this rank's step by the adaptive sum of everyone's."""
    assert isinstance(optimizer, _AdasumOptimizer)
    begun_at, optimizer._begun_at = optimizer._begun_at, []
    if rank_info.size() == 1 or not optimizer._process_set.included() or not begun_at:
        return
    params = _trained(optimizer)
    steps = [param - start for param, start in zip(params, begun_at, strict=True)]
    pairs = [optimizer._compression.compress(step) for step in steps]
    wires = [wire for wire, _ in pairs]
    synchronize(grouped_allreduce_async_(wires, None, "adasum", Adasum, process_set=optimizer._process_set))
    for param, start, (wire, context) in zip(params, begun_at, pairs, strict=True):
        param.copy_(start + optimizer._compression.decompress(wire, context))
