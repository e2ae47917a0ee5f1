"""`run_first_part`: asserts that an operation keeps to what it may write before the ranks have agreed on it.

Until then other ranks may still read the staging buffers of the operation before, and where the ranks
disagree, all tensors must be as before. Two transports that break this give wrong sums once in a million
operations, so with MPISGD_CHECK_STAGING=1 every operation is looked at. What a rank writes into another
one's coming buffer is found where the ranks are threads of which one runs at a time
(`mpisgd.job.threads_as_ranks`); elsewhere its owner writes there at the same time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.interfaces.host_transport import HostTransport
from mpisgd.threads.scheduling import scheduler

__all__ = ["run_first_part"]


def run_first_part(
    first_part: Callable[[], object], transport: HostTransport, tensors: Sequence[Tensor]
) -> None:
    """Run an operation up to the consistency check.

    Args:
        first_part: that of the operation.
        transport: what it goes through.
        tensors: that the operation reads and writes; those on a device are not looked at.

    Raises:
        AssertionError: something else was written than this rank's coming half of the staging memory.

    Cost: copies and compares `transport.guarded()`, some MiB for each rank of the host, and the tensors.
    """
    of_call = [tensor.detach() for tensor in tensors if not on_device(tensor)]
    guarded = list(transport.guarded(alone=scheduler() is not None))
    before = [_bytes(tensor) for tensor in (*guarded, *of_call)]
    first_part()
    for place, (tensor, then) in enumerate(zip((*guarded, *of_call), before, strict=True)):
        if not torch.equal(_bytes(tensor), then):
            what = (
                f"staging buffer {place} of those guarded" if place < len(guarded) else "a tensor of the call"
            )
            raise AssertionError(
                f"transport {transport.name!r} has written into {what}, before the ranks have agreed"
            )


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of the bytes of a tensor: NaN is unequal to itself."""
    copy = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8)
