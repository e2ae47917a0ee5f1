"""The operations of torch's process group, each by ours: collectives, point to point, how they are issued.

torch calls these methods from Python (`dist.all_reduce`) and from C++ (DDP's reducer, functional
collectives). Ranks in their arguments are ranks of the group; ours take ranks of the job.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather, all_gather_into_tensor
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.all_to_all import all_to_all, all_to_all_single
from mpisgd.collectives.barrier import barrier
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.coalesced import (
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from mpisgd.collectives.gather import gather, scatter
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.collectives.reduce import reduce
from mpisgd.collectives.reduce_scatter import reduce_scatter, reduce_scatter_tensor
from mpisgd.collectives.sparse import all_reduce_sparse
from mpisgd.config import LONGEST_TIMEOUT_S
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import NotInitialized, ShapeMismatch
from mpisgd.torch_backend import compat
from mpisgd.torch_backend.barrier import pass_monitored
from mpisgd.torch_backend.profiling import with_profiler_events
from mpisgd.torch_backend.short_forms import with_short_forms
from mpisgd.torch_backend.work import BackendWork

__all__ = ["Operations"]


Tensors = Sequence[Tensor]
TensorLists = Sequence[Tensors]

# Its methods are overloaded there in ways that only C++ knows how to write; see torch's own threaded group.
_Base: Any = dist.ProcessGroup


@compat.never_compiled
@compat.with_old_names
@with_profiler_events
@with_short_forms
class Operations(_Base):  # type: ignore[misc]
    """What the members of a process group do together; see `ProcessGroupMpisgd`.

    Attributes:
        mpisgd_group: the ranks, for `group=` of mpisgd's own functions.
    """

    mpisgd_group: Any
    _aborted: NotInitialized | None = None  # raised by operations from then on
    _coalesced: list[BackendWork] | None = None  # those that one `Work` will stand for

    # -- collectives on lists of tensors, of which torch passes one ------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine each tensor over the group, in place."""
        op, factor = compat.reduction_of(opts.reduceOp), compat.factor_of(opts.reduceOp)
        _multiply(tensors, factor)
        if any(tensor.is_sparse for tensor in tensors):
            for tensor in tensors:
                tensor.copy_(all_reduce_sparse(tensor, op, self.mpisgd_group))
            return self._track([], tensors)
        return self._issue(opts, tensors, [partial(all_reduce, t, op) for t in tensors])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine all tensors over the group, in place, in few messages."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        op, factor = compat.reduction_of(opts.reduceOp), compat.factor_of(opts.reduceOp)
        _multiply(tensors, factor)
        return self._issue(opts, tensors, [partial(all_reduce_coalesced, tensors, op)])

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy the root's tensors into those of every rank."""
        root = self._job_rank(opts.rootRank)
        return self._issue(opts, tensors, [partial(broadcast, t, root) for t in tensors])

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine each tensor over the group into that of the root; on other ranks it is unchanged."""
        root, op = self._job_rank(opts.rootRank), compat.reduction_of(opts.reduceOp)
        factor = compat.factor_of(opts.reduceOp)
        sources = tensors
        if opts.rootRank == self.mpisgd_group.rank:
            _multiply(tensors, factor)
        else:
            sources = _multiplied(tensors, factor)
        return self._issue(opts, tensors, [partial(reduce, t, root, op) for t in sources])

    def allgather(self, outputs: TensorLists, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy `inputs[i]` of rank r into `outputs[i][r]` of every rank; sizes may differ between ranks."""
        pairs = list(zip(outputs, inputs, strict=True))
        result = list(outputs[0]) if len(pairs) == 1 else list(outputs)
        return self._issue(opts, result, [partial(all_gather, o, t) for o, t in pairs])

    def allgather_coalesced(self, outputs: TensorLists, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy `inputs[i]` of rank r into `outputs[r][i]` of every rank."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: TensorLists, opts: Any = None) -> dist.Work:
        """Combine `inputs[i]` over the group; rank r keeps the r-th of them in `outputs[i]`.

        Parts may differ in size, as with NCCL; each is an operation of its own then.
        """
        op, factor = compat.reduction_of(opts.reduceOp), compat.factor_of(opts.reduceOp)
        calls: list[Callable[..., Work | None]] = []
        for out, parts in zip(outputs, inputs, strict=True):
            sources = _multiplied(parts, factor)
            if len({part.numel() for part in sources}) > 1:
                calls += self._reductions(out, sources, op)
            else:
                calls.append(partial(reduce_scatter, out, sources, op))
        return self._issue(opts, list(outputs), calls)

    def _reductions(
        self, output: Tensor, parts: Tensors, op: ReduceOp
    ) -> "Iterator[Callable[..., Work | None]]":
        """Yield the reduction of each part of another size to its rank, this rank's in `output`."""
        own = self.mpisgd_group.rank
        if len(parts) != self.mpisgd_group.size or output.shape.numel() != parts[own].numel():
            raise ShapeMismatch(
                f"reduce_scatter: input_list has tensors of {[part.numel() for part in parts]} elements, the "
                f"output of group rank {own} has {output.numel()}; expected one tensor per rank, and as many "
                "elements as this rank's"
            )
        with torch.no_grad():
            output.copy_(parts[own].view_as(output))
        for rank, part in enumerate(parts):
            yield partial(reduce, output if rank == own else part, self._job_rank(rank), op)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy `inputs[r]` into the entry of this rank in rank r's outputs."""
        return self._issue(opts, list(outputs), [partial(all_to_all, outputs, inputs)])

    def gather(self, outputs: TensorLists, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy `inputs[i]` of rank r into `outputs[i][r]` of the root."""
        root = self._job_rank(opts.rootRank)
        lists: Sequence[Any] = outputs or [None] * len(inputs)  # only the root has some
        result = list(outputs[0]) if outputs else []
        return self._issue(
            opts, result, [partial(gather, t, o, root) for o, t in zip(lists, inputs, strict=True)]
        )

    def scatter(self, outputs: Tensors, inputs: TensorLists, opts: Any = None) -> dist.Work:
        """Copy `inputs[i][r]` of the root into `outputs[i]` of rank r."""
        root = self._job_rank(opts.rootRank)
        lists: Sequence[Any] = inputs or [None] * len(outputs)  # only the root has some
        pairs = zip(outputs, lists, strict=True)
        return self._issue(opts, list(outputs), [partial(scatter, o, t, root) for o, t in pairs])

    # -- collectives on one tensor ---------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather `input` of all ranks into `output` of every rank, in rank order."""
        return self._issue(opts, [output], [partial(all_gather_into_tensor, output, input)])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather `inputs[i]` of all ranks into `outputs[i]` of every rank, in few messages."""
        return self._issue(opts, list(outputs), [partial(all_gather_into_tensor_coalesced, outputs, inputs)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Combine `input` over the group; this rank keeps its slice in `output`."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        op = compat.reduction_of(opts.reduceOp)
        (source,) = _multiplied([input], compat.factor_of(opts.reduceOp))
        return self._issue(opts, [output], [partial(reduce_scatter_tensor, output, source, op)])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Combine `inputs[i]` over the group; this rank keeps its slices, in few messages."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        op = compat.reduction_of(opts.reduceOp)
        sources = _multiplied(inputs, compat.factor_of(opts.reduceOp))
        return self._issue(
            opts, list(outputs), [partial(reduce_scatter_tensor_coalesced, outputs, sources, op)]
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Send piece r of `input`, cut along its first dimension, to rank r; `output` gets the pieces."""
        sizes = (list(output_split_sizes) or None, list(input_split_sizes) or None)
        return self._issue(opts, [output], [partial(all_to_all_single, output, input, *sizes)])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every rank of the group."""
        limit = getattr(opts, "timeout", None)
        timeout_s = None
        if limit is not None and limit > timedelta(0):
            timeout_s = min(limit.total_seconds(), LONGEST_TIMEOUT_S)
        return self._issue(opts, [], [partial(barrier, timeout_s=timeout_s)])

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank of the group; see `mpisgd.torch_backend.monitored_barrier`."""
        pass_monitored(self.mpisgd_group, timeout, wait_all_ranks)

    # -- point to point --------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Start sending to a rank of the group."""
        peer = self._peer(dst)
        tensors = [compat.arrived(tensor) for tensor in _listed(tensors)]
        return self._track([isend(tensor, peer, self.mpisgd_group, tag) for tensor in tensors], tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Start receiving from a rank of the group."""
        peer = self._peer(src)
        tensors = _listed(tensors)
        return self._track([irecv(tensor, peer, self.mpisgd_group, tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start receiving from any rank; the work's `_source_rank()` returns the sender."""
        self._check_not_aborted()
        tensors = _listed(tensors)
        return self._track([irecv(tensor, None, self.mpisgd_group, tag) for tensor in tensors], tensors)

    # -- how operations are issued ---------------------------------------------------------------------

    def _issue(self, opts: Any, result: Any, calls: Sequence[Callable[..., Work | None]]) -> dist.Work:
        """Make each call in this group, and wait for it where torch is going to."""
        async_op = not compat.blocks(opts)
        works = [call(group=self.mpisgd_group, async_op=async_op) for call in calls]
        return self._track([work for work in works if work is not None], result)

    def _track(self, works: Sequence[Work], result: Any) -> dist.Work:
        work = BackendWork(works, result)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin to collect the operations that one `Work` will stand for."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return the `Work` of everything issued since `_start_coalescing`."""
        collected, self._coalesced = self._coalesced or [], None
        works = [inner for work in collected for inner in work.works]
        return BackendWork(works, [work.result() for work in collected])

    def _peer(self, group_rank: int) -> int:
        """Return the job's rank of the other end of a message."""
        self._check_not_aborted()
        return self._job_rank(group_rank)

    def _check_not_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    def _job_rank(self, group_rank: int) -> int:
        rank: int = self.mpisgd_group.ranks[group_rank]
        return rank


def _listed(tensors: Any) -> list[Tensor]:
    """Return a list of what may be one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _multiply(tensors: Tensors, factor: float | Tensor | None) -> None:
    """Multiply in place, for what is a factor before a sum."""
    if factor is not None:
        with torch.no_grad():
            for tensor in tensors:  # a sparse one takes no tensor as a factor
                tensor.mul_(float(factor) if tensor.is_sparse else factor)


def _multiplied(tensors: Tensors, factor: float | Tensor | None) -> list[Tensor]:
    """Return the tensors as they are, or multiplied copies."""
    return list(tensors) if factor is None else [tensor.detach() * factor for tensor in tensors]
