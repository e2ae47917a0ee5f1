"""`ProcessGroupMpisgd`: a `torch.distributed.ProcessGroup` on one of our groups.

torch calls these methods from Python (`dist.all_reduce`) and from C++ (DDP's reducer, functional
collectives). Ranks in their arguments are ranks of the group; ours take ranks of the job.
"""

import warnings
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
from mpisgd.config import BACKEND, LONGEST_TIMEOUT_S
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import CollectiveTimeout, NotInitialized, ShapeMismatch, UnsupportedOp
from mpisgd.job.groups import close_group, leave_group
from mpisgd.job.recovery import free_old_worlds
from mpisgd.torch_backend import compat
from mpisgd.torch_backend.barrier import pass_monitored
from mpisgd.torch_backend.membership import Membership, are_handles_known, handle_of_process
from mpisgd.torch_backend.profiling import with_profiler_events
from mpisgd.torch_backend.short_forms import with_short_forms
from mpisgd.torch_backend.window import BackendWindow
from mpisgd.torch_backend.work import BackendWork

__all__ = ["ProcessGroupMpisgd"]


Tensors = Sequence[Tensor]
TensorLists = Sequence[Tensors]

# Its methods are overloaded there in ways that only C++ knows how to write; see torch's own threaded group.
_Base: Any = dist.ProcessGroup


class _NoMembers:
    """In the place of `mpisgd_group`, until there is one: its value on the object hides this one."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        raise NotInitialized(
            "this process group has no members yet, since it was made with enable_reconfigure=True; call "
            "reconfigure first"
        )


@compat.never_compiled
@compat.with_old_names
@with_profiler_events
@with_short_forms
class ProcessGroupMpisgd(_Base):  # type: ignore[misc]
    """A process group of the backend "mpisgd"; made by `init_process_group` and `new_group` only.

    Operations run in the order in which they are issued. With `async_op=False` they run at once. Asynchronous
    ones run at once if all ranks have issued them and share a host, and otherwise in a thread of the group.

    Attributes:
        mpisgd_group: the value for `group=` of mpisgd's own functions; another one after each `reconfigure`.
    """

    mpisgd_group: Any = _NoMembers()

    def __init__(self, group: Group | None, store: Any, membership: Membership) -> None:
        super().__init__(*(-1, -1) if group is None else (group.rank, group.size))
        if group is not None:
            self.mpisgd_group = group
        self._membership = membership
        self._store = store
        self._name = ""
        self._desc = ""
        self._coalesced: list[BackendWork] | None = None
        self._aborted: NotInitialized | None = None

    def __repr__(self) -> str:
        group = self._found_group()
        return f"ProcessGroupMpisgd(name={self._name!r}, ranks={list(group.ranks) if group else []})"

    def _found_group(self) -> Group | None:
        """Return `mpisgd_group`, None where there is none yet."""
        found: Group | None = vars(self).get("mpisgd_group")
        return found

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

    # -- what it is ------------------------------------------------------------------------------------

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    getBackendName = _get_backend_name = name

    def get_group_store(self) -> Any:
        """Return the store of the rendezvous."""
        return self._store

    def getGroupName(self) -> str:
        """Return the name of this group in torch."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the description of this group in torch."""
        return self._desc

    def setGroupName(self, name: str) -> None:
        """Set the name that torch gives the group."""
        self._name = name

    def setGroupDesc(self, desc: str) -> None:
        """Set the description that torch gives the group."""
        self._desc = desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(device) for device in devices]

    # torch asks the group for a backend per device; ours is the group itself, and these are its answers.

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_window = compat.HAS_WINDOWS

    def _get_backend(self, device: torch.device) -> "ProcessGroupMpisgd":
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors need no special memory."""
        return False

    # -- other members (from torch 2.14 on) ------------------------------------------------------------

    def getRank(self) -> int:
        """Return this rank's number in the group; -1 before the first `reconfigure`."""
        return -1 if (group := self._found_group()) is None else group.rank

    def getSize(self) -> int:
        """Return the number of members; -1 before the first `reconfigure`."""
        return -1 if (group := self._found_group()) is None else group.size

    @property
    def supports_reconfigure(self) -> bool:
        """Whether this torch has `reconfigure`, and the default group is one of this backend."""
        return compat.HAS_RECONFIGURE and are_handles_known()

    def get_reconfigure_handle(self) -> str:
        """Return the text that identifies this process in `reconfigure`; it never changes."""
        if not are_handles_known():
            raise UnsupportedOp(
                "get_reconfigure_handle: needs a default group of 'mpisgd', and a job that mpisgd.elastic "
                "has not begun anew"
            )
        return handle_of_process()

    def reconfigure(self, opts: Any) -> dist.Work:
        """Replace the members of the group by those that `opts.handles` names. Collective over these.

        The members are ranks of the job. If a rank of the job was lost, all remaining ranks must call it; it
        then also restarts the job with them, and other groups can be reconfigured afterwards.

        Args:
            opts: torch's ReconfigureOptions. `uuid`: the same on all members, and new to this group.
                `handles`: a list in the order of the new ranks, or a set, for the order of the job.
                `timeout`: of the reconfiguration. `hints` are not used.

        Returns:
            A finished `Work`. If an error is raised, the group is unchanged.

        Raises:
            InvalidArgument: the uuid was used before, the timeout is not positive, or a handle is unknown,
                given twice, or that of this rank is missing; before anything is sent.
            CollectiveMismatch: members gave different orders.
            CollectiveTimeout: a member did not come, or gave another uuid or other handles.
            JobError: after a loss, this is the smaller part of a partitioned network.
        """
        before = self._found_group()
        self.mpisgd_group = self._membership.renew(before, opts)
        self._aborted, self._coalesced = None, None
        if before is not None and before.job is not self.mpisgd_group.job:
            free_old_worlds()
        return BackendWork([], None)

    # -- one-sided communication (from torch 2.14 on) --------------------------------------------------

    def new_window(self, tensor: Tensor | None = None) -> BackendWindow:
        """Return a window of the group, with `tensor` registered if it is given. Collective then."""
        window = BackendWindow(self.mpisgd_group)
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    # -- its limits and its end ------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations wait this long for other ranks from now on."""
        self._membership.timeout_s = timeout.total_seconds()
        if (group := self._found_group()) is not None and group.is_usable:
            group.queue.consistency.timeout_s = timeout.total_seconds()
            group.point_to_point.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group; torch's `destroy_process_group` calls this. Collective over its members.

        After a failed operation this rank does not wait; the others are told that it has left the group.
        """
        # Where mpisgd.shutdown() was quicker there is nothing to give back.
        if (group := self._found_group()) is not None and group in group.job.groups:
            close_group(group)

    def abort(self) -> None:
        """End this rank's waits in the group with an error; every later operation raises.

        May be called from any thread. This rank then no longer belongs to the group: other ranks do not wait
        for it when they destroy the group or end the program; their operations raise at the group's timeout.
        """
        if (group := self._found_group()) is None or not group.is_usable:
            return  # nothing waits
        error = NotInitialized(f"{self!r} was aborted")
        self._aborted = self._aborted or error
        if group.device is not None:  # first: what waits for the GPU is not woken otherwise
            group.device.abandon(error)
        group.point_to_point.abandon_devices(error)
        if group.queue.abort(error):
            leave_group(group)
        else:
            warnings.warn(
                f"abort: {self!r} is in a call of MPI, which cannot be interrupted; the operation goes on",
                RuntimeWarning,
                2,
            )
        group.point_to_point.abandon(error)

    def get_error(self) -> Any:
        """Return torch's ErrorType: SUCCESS as long as no operation has failed on this rank."""
        group = self._found_group()
        broken = None if group is None else group.broken
        if broken is None and self._aborted is None:
            return compat.error_type("SUCCESS")
        return compat.error_type("TIMEOUT" if isinstance(broken, CollectiveTimeout) else "COMM_ERROR")


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
