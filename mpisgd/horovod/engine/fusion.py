"""Which decided operations run as one: a pure function of what all ranks know."""

from collections.abc import Sequence

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.horovod.engine.request_table import Decision

__all__ = ["fuse"]


def fuse(decisions: Sequence[Decision], nbytes: Sequence[int], threshold_bytes: int) -> list[list[Decision]]:
    """Group decisions into batches that run as one operation each.

    All-reductions of the same process set, dtype, device, reduction and factors travel together, looking
    past others in between, until a batch holds `threshold_bytes`. Large ones travel alone, and so does
    Adasum, which is defined by tensor.

    Args:
        decisions: in order; none has an error.
        nbytes: how many bytes each moves.
        threshold_bytes: 0: nothing is fused.
    """
    batches: list[list[Decision]] = []
    open_batch: dict[object, tuple[list[Decision], int]] = {}
    for decision, size in zip(decisions, nbytes, strict=True):
        kind = _fused_with(decision) if size < ALONE_BYTES else None
        batch, filled = open_batch.get(kind, ([], 0))
        if kind is None or not batch or filled + size > threshold_bytes:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(decision)
        open_batch[kind] = (batch, filled + size)
    return batches


def _fused_with(decision: Decision) -> object:
    """Return what operations must have in common to travel together; None: travels alone."""
    request = decision.request
    if request.kind != "allreduce" or request.op == "Adasum" or len(set(request.dtypes)) != 1:
        return None
    return (
        request.set_id,
        request.op,
        request.dtypes[0],
        request.device,
        request.prescale,
        request.postscale,
        decision.absent,
    )
