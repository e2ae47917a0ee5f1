"""No communication while a CUDA graph is captured.

A replay repeats the kernels and none of what the host did beside them: copies that it waits for, comparisons
with the other ranks, hooks that notice a backward.
"""

from mpisgd.accelerator.runtime import runtime
from mpisgd.errors import InvalidArgument

__all__ = ["check_not_capturing"]


def check_not_capturing(what: str) -> None:
    """Raise where this thread's current stream records a CUDA graph.

    Raises:
        InvalidArgument: before anything is sent; on every rank, where all capture.
    """
    if runtime().is_capturing():
        raise InvalidArgument(
            f"{what} while a CUDA graph is captured: a replay would repeat the kernels, and not what the "
            "host does between the ranks, so gradients would not be reduced, or nobody would notice that "
            "ranks differ. Capture forward and backward of a model without a DistributedOptimizer, and call "
            "mpisgd.all_reduce_coalesced([p.grad for p in params], 'avg') after each replay"
        )
