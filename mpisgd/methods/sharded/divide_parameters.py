"""Which rank updates what, as a strategy and its options say."""

import sys

import torch

from mpisgd.accelerator.runtime import on_device
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.elementwise import is_known_elementwise
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.shared_parameters import SharedParameters
from mpisgd.sharding.update_work import declares_work, work_of

__all__ = ["divide_parameters"]


def divide_parameters(
    training: Training,
    stage: int,
    master_dtype: torch.dtype | None,
    offload: Offload | None,
    *,
    keeps_masters: bool = False,
) -> DividedParameters:
    """Divide the parameters of an optimizer among the ranks, or those of each host. Collective.

    Args:
        training: the optimizer, the parameters and the ranks.
        stage: see `Sharded`, as for the rest; 0: the ranks of each host divide everything.
        master_dtype: of the copies that the optimizer updates.
        offload: where the state is.
        keeps_masters: see `DividedParameters`.
    """
    optimizer = training.optimizer
    kind = SharedParameters if training.share_parameters or not stage else DividedParameters
    owners = Owners(training.group, of_host=not stage)
    is_elementwise = is_known_elementwise(optimizer) or training.elementwise or declares_work(optimizer)
    return kind(
        training.named,
        optimizer.param_groups,
        owners,
        elementwise=is_elementwise,
        work_of=work_of(optimizer),
        joins=_joins(owners, stage, one_copy=kind.one_copy),
        master_dtype=master_dtype,
        cuts_alone=offload is not None,
        masters_on_host=offload is not None and any(on_device(p) for _, p in training.named[:1]),
        keeps_masters=keeps_masters,
        most_bytes=sys.maxsize if offload is None else offload.chunk_bytes,
    )


def _joins(owners: Owners, stage: int, *, one_copy: bool) -> bool:
    """Return whether small parameters share pieces. In a copy per host all must be there on every host."""
    if one_copy and stage:
        return stage == 1 and len(owners.nodes) == 1 < owners.size
    return owners.size > 1 or not stage
