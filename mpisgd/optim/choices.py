"""What `DistributedOptimizer` is asked for: checked on each rank, and told in words that ranks compare."""

from typing import Any

from mpisgd.arguments import shown
from mpisgd.compress.compressor import Compressor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.tree_sum import TreeSum
from mpisgd.methods.adasum.adasum import AdaptiveSum, Adasum
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.strategy.training import Training

__all__ = ["check_choices", "in_one_order", "resolve_reduction", "summary"]


def resolve_reduction(op: Any, compression: Compressor | str | None) -> tuple[ReduceOp, Compressor]:
    """Return the reduction and what travels: an adaptive sum is no reduction element by element.

    Raises:
        InvalidArgument: Adasum was chosen together with a compression, or as one.
    """
    chosen: Any = Compression.none if compression is None else compression
    if isinstance(chosen, str) and chosen == "auto":
        from mpisgd.methods.auto.auto import Auto  # others need not load its candidates

        chosen = Auto()
    if isinstance(chosen, Compressor) and chosen.traits.replaces_op:
        raise InvalidArgument("DistributedOptimizer: Adasum is no compression; pass op=mpisgd.Adasum")
    if isinstance(op, str):  # other names are refused with the other options
        op = {"ADASUM": Adasum, "AVG": ReduceOp.AVG, "SUM": ReduceOp.SUM}.get(op.upper(), op)
    if not isinstance(op, AdaptiveSum):
        return op, chosen
    if chosen != Compression.none:
        raise InvalidArgument(
            f"DistributedOptimizer: op=mpisgd.Adasum does not go with compression={chosen}: it sends "
            "gradients as they are"
        )
    return ReduceOp.AVG, op


def in_one_order(
    options: ReductionOptions, reproducible: Any, passes: int, group: Group
) -> tuple[ReductionOptions, TreeSum | None]:
    """Return options by which the gradients of all micro-batches are added along one tree, and the tree.

    Args:
        options: what was asked for beside it; returned as they are where nobody asks for one order.
        reproducible: None, or "ranks".
        passes: micro-batches of each rank in a step.
        group: the ranks.

    Raises:
        InvalidArgument: another one of `reproducible`; these ranks have no subtree each; an option that adds
            gradients in another order.
    """
    if reproducible is None:
        return options, None
    if not isinstance(reproducible, str) or reproducible != "ranks":
        raise InvalidArgument(
            f"DistributedOptimizer: reproducible={shown(reproducible)}; expected 'ranks' or None"
        )
    tree = TreeSum(passes * group.size if options.op is ReduceOp.AVG else 1)
    others = {
        f"compression={options.compression}": options.compression != Compression.none,
        f"overlap={options.overlap}": options.overlap is True,
        f"{group.size} ranks; their number must be a power of two": group.size & (group.size - 1) != 0,
    }
    for other, is_there in others.items():
        if is_there:
            raise InvalidArgument(f"DistributedOptimizer: {tree} does not go with {other}")
    return options._replace(compression=tree, overlap=False), tree


def check_choices(strategy: Any, check_every: Any) -> None:
    """Raise InvalidArgument where the strategy is none, or a period impossible."""
    if not isinstance(strategy, Strategy):
        raise InvalidArgument(
            f"DistributedOptimizer: strategy={shown(strategy)}; expected mpisgd.Synchronous() or another "
            "mpisgd.Strategy"
        )
    if not isinstance(check_every, int) or check_every < 0:
        raise InvalidArgument(
            f"check_in_sync_every={check_every!r}; expected a number of steps, or 0 for never"
        )


def summary(strategy: Strategy, training: Training, passes: int) -> str:
    """Say what all ranks must have chosen alike."""
    options = training.options
    return (
        f"strategy={strategy!r}, op={options.op.name}, compression={options.compression!r}, "
        f"backward_passes_per_step={passes}, gradient_predivide_factor={options.predivide_factor}, "
        f"bucket_cap_bytes={options.bucket_cap_bytes}, error_if_nonfinite={options.error_if_nonfinite}, "
        f"check_in_sync_every={training.check_in_sync_every}, share_parameters={training.share_parameters}, "
        f"elementwise={training.elementwise}"
    )
