"""`sparse_allreduce_async`: sparse tensors travel as indices and values."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.errors import UnsupportedTensor
from mpisgd.horovod.arguments import as_tensor, check_name
from mpisgd.horovod.ops.allgather import gather_to_reduce
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.reduce_ops import Average, Sum
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.horovod.state import engine

__all__ = ["sparse_allreduce_async", "sparse_dims_sent_by_others"]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to combine the sparse `tensor` of all ranks.

    Args:
        tensor: COO, of the same shape, dtype and number of sparse dimensions on all members; unchanged.
        name: identifies the operation on all members.
        op: Average or Sum.
        process_set: who takes part.

    Returns:
        A function that waits and returns the result, a coalesced sparse tensor; `synchronize` calls it too.

    Raises:
        ValueError: another `op`.
    """
    if not isinstance(op, int) or op not in (Average, Sum):
        raise ValueError(
            f"sparse_allreduce_async: op={shown(op)}; sparse tensors take hvd.Average or hvd.Sum"
        )
    check_name("sparse_allreduce_async", name)
    if as_tensor("sparse_allreduce_async", tensor).layout is not torch.sparse_coo:
        raise UnsupportedTensor(f"sparse_allreduce_async: tensor has layout {tensor.layout}; expected COO")
    own = tensor.detach().coalesce()
    indices = gather_to_reduce(own.indices().T.contiguous(), f"{name}.indices", op, process_set)
    values = gather_to_reduce(own.values(), f"{name}.values", op, process_set)

    def finish() -> Tensor:
        gathered, places = synchronize(values), synchronize(indices)
        if op == Average:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(places.T, gathered, own.shape, check_invariants=False).coalesce()

    return finish


def sparse_dims_sent_by_others(process_set: ProcessSet, prefix: str) -> dict[str, int]:
    """Return the numbers of sparse dimensions of what others have submitted and this rank has not.

    By name, of the names that begin with `prefix`; as far as the last cycle told.
    """
    set_id = process_set.process_set_id
    assert set_id is not None
    waiting = engine().awaited(set_id, f"allgather.{prefix}")
    indices = [request for request in waiting if request.label.endswith(".indices")]
    return {request.label.removesuffix(".indices"): request.shapes[0][0] for request in indices}
