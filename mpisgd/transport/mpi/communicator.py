"""`Communicator`: one MPI communicator."""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mpi4py import MPI
from torch import Tensor

from mpisgd import tracing
from mpisgd.errors import ShapeMismatch
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.transport.mpi.calls import mpi_call
from mpisgd.transport.mpi.datatypes import address, native, pieces, spec

__all__ = ["Communicator", "as_mpi", "free_abandoned", "revoke_all"]

_communicators: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
# Requests that were abandoned, with their memory, which MPI may write to even when the communicator is freed.
_abandoned: list[tuple[list[MPI.Request], object]] = []
_kept: list[object] = []  # until the process ends


def revoke_all() -> None:
    """End whatever goes on over any communicator, here and on all ranks that it reaches, without waiting.

    Every rank that was lost may have left others in the middle of anything, on communicators that not all
    of them have finished making.
    """
    for communicator in list(_communicators):
        communicator.revoke()


def free_abandoned() -> None:
    """Free the memory of abandoned requests, as far as MPI is done with it."""
    _abandoned[:] = [entry for entry in _abandoned if not _are_over(entry[0])]


def _are_over(requests: Sequence[MPI.Request]) -> bool:
    return all(_is_over(request) for request in requests)


def _is_over(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as exc:
        return exc.Get_error_class() != getattr(MPI, "ERR_PROC_FAILED_PENDING", MPI.UNDEFINED)


def _only_thread() -> int | None:
    """Return the thread that alone may call MPI, None where all may."""
    if MPI.Query_thread() >= MPI.THREAD_SERIALIZED:
        return None
    return threading.get_ident() if MPI.Is_thread_main() else threading.main_thread().ident


class Communicator:
    """One MPI communicator, spoken to in the memory of contiguous tensors; counts what it sends.

    Every method takes contiguous CPU tensors and ranks of this communicator. Requests belong to the
    caller, who also keeps the tensors alive until they are complete.

    Attributes:
        sent_bytes: payload handed to MPI's point-to-point sends by this rank.
        sent_messages: number of those sends.
        calls: how often each of MPI's own collectives was called.
        given_bytes: what this rank has given to each of them, as far as it is reduced, gathered, exchanged or
            broadcast.
        global_ranks: what its ranks are called in messages: the job's ranks.
        tag_limit, only_thread: see `mpisgd.interfaces.communicator.GroupCommunicator`.
    """

    def __init__(self, comm: Any, parent: "Communicator | None" = None, *, apart: bool = False) -> None:
        self.comm: MPI.Intracomm = comm
        self.global_ranks = _global_ranks(comm, parent)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.sent_bytes = 0
        self.sent_messages = 0
        self.calls: Counter[str] = Counter()
        self.given_bytes: Counter[str] = Counter()
        self.tag_limit: int = comm.Get_attr(MPI.TAG_UB) or 32767
        self.only_thread = _only_thread()
        inherited = _communicators if parent is None else parent._family
        self._family: weakref.WeakSet[Communicator] = weakref.WeakSet() if apart else inherited
        self._family.add(self)

    # -- life of the communicator -------------------------------------------------------------------

    @mpi_call("Comm_dup", blocks=True)
    def duplicate(self, *, apart: bool = False) -> "Communicator":
        """Return a communicator of its own over the same ranks. Collective.

        Args:
            apart: whether `revoke_all` spares it, and all that are made of it.
        """
        return Communicator(_intra(self.comm.Dup()), self, apart=apart)

    @mpi_call("Comm_split", blocks=True)
    def subset(self, ranks: Sequence[int], *, apart: bool = False) -> "Communicator | None":
        """Return a communicator over `ranks` in that order, None on the others. Collective over this one."""
        color = 0 if self.rank in ranks else MPI.UNDEFINED
        key = ranks.index(self.rank) if self.rank in ranks else 0
        comm = self.comm.Split(color, key)
        return None if comm == MPI.COMM_NULL else Communicator(_intra(comm), self, apart=apart)

    @mpi_call("Comm_create_group", blocks=True)
    def create_group(self, ranks: Sequence[int], tag: int, *, apart: bool = False) -> "Communicator":
        """Return a communicator over `ranks` in the order given. Collective over them alone.

        Args:
            ranks: of this communicator, this one among them.
            tag: keeps apart what threads or overlapping sets of ranks ask for at the same time.
            apart: see `duplicate`.
        """
        everyone = self.comm.Get_group()
        members = everyone.Incl(list(ranks))
        comm = self.comm.Create_group(members, tag)
        members.Free()
        everyone.Free()
        return Communicator(comm, self, apart=apart)

    @mpi_call("Comm_split", blocks=True)
    def split(self, color: int) -> "Communicator":
        """Return a communicator over the ranks that give the same `color`, ordered as here. Collective."""
        return Communicator(_intra(self.comm.Split(color, self.rank)), self)

    @mpi_call("Comm_split_type", blocks=True)
    def same_host(self) -> "Communicator":
        """Return a communicator over the ranks that share this rank's host. Collective."""
        return Communicator(_intra(self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)), self)

    @mpi_call("Comm_free", blocks=True)
    def free(self) -> None:
        """Free the communicator. Collective."""
        self._family.discard(self)
        self.comm.Free()

    def abort(self, exit_code: int) -> None:
        """End every process of the job."""
        self.comm.Abort(exit_code)

    # -- where a rank was lost (ULFM) ---------------------------------------------------------------

    def lost(self) -> list[int]:
        """Return the ranks of this communicator that are known to be gone. The query lets MPI notice it."""
        MPI.COMM_SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # of a revoked communicator it moves no message
        failed = self.comm.Get_failed()
        try:
            return sorted(_places(failed, self.comm)) if failed.size else []
        finally:
            failed.Free()  # else 230 MB a day, where it is asked 20 times a second

    def revoke(self) -> None:
        """End whatever goes on over this communicator, on every rank."""
        with contextlib.suppress(MPI.Exception):
            self.comm.Revoke()

    def revoke_family(self) -> None:
        """End whatever goes on over this communicator, which is apart, and those that were made of it."""
        for communicator in list(self._family):
            communicator.revoke()

    def is_revoked(self) -> bool:
        """Return whether a rank has revoked it."""
        return self.comm.Is_revoked()

    @mpi_call("Shrink", blocks=True)
    def shrink(self) -> "Communicator":
        """Return a communicator over the ranks that are left, in their order. Collective over these."""
        return Communicator(self.comm.Shrink())

    @mpi_call("Agree", blocks=True)
    def agree(self, holds: bool) -> bool:
        """Return, alike on all ranks that are left, whether it `holds` on each and no other has been lost."""
        try:
            return bool(self.comm.Agree(int(holds)))
        except MPI.Exception:
            return False

    def acknowledge(self) -> None:
        """Take note of the ranks known to be lost: the next `agree` need not tell of them again."""
        self.comm.Ack_failed()

    @mpi_call("Spawn", blocks=True)
    def spawn(self, command: Sequence[str], number: int, env: Mapping[str, str]) -> "Communicator":
        """Start more processes; return an intercommunicator to them once they run MPI. Collective."""
        info = MPI.Info.Create()
        info.Set("PMIX_ENVAR", "\n".join(f"{name}={value}" for name, value in env.items()))
        comm = self.comm.Spawn(command[0], list(command[1:]), number, info, 0)
        info.Free()
        return Communicator(comm)

    @mpi_call("Intercomm_merge", blocks=True)
    def merge(self, *, behind: bool) -> "Communicator":
        """Return a communicator over both sides of this one, and free this one. Collective.

        Args:
            behind: whether my side comes last.
        """
        comm: Any = self.comm
        merged = Communicator(comm.Merge(behind))
        _communicators.discard(self)
        comm.Disconnect()  # else MPI's end crashes in Open MPI 5.0
        return merged

    # -- point to point -----------------------------------------------------------------------------

    @mpi_call("Isend")
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Request:
        """Start sending `tensor` to `dst`."""
        self.sent_bytes += tensor.nbytes
        self.sent_messages += 1
        if tracing.sink is not None:
            tracing.sink.sent(self.global_ranks[dst], tensor.nbytes)
        return self.comm.Isend(spec(tensor), dst, tag)

    @mpi_call("Irecv")
    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> Request:
        """Start receiving into `tensor` from `src`, None for whoever sends first."""
        return self.comm.Irecv(spec(tensor), MPI.ANY_SOURCE if src is None else src, tag)

    @mpi_call("Testall")
    def poll(self, requests: Sequence[Request]) -> bool:
        """Return whether all of `requests` are complete, and let MPI make progress."""
        return MPI.Request.Testall(cast("Sequence[MPI.Request]", requests))

    @mpi_call("Test")
    def poll_one(self, request: Request) -> tuple[int, int] | None:
        """Return (source rank, bytes received) once `request` is complete, None before."""
        status = MPI.Status()
        try:
            done = cast(MPI.Request, request).Test(status)
        except MPI.Exception as exc:
            if exc.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            # Open MPI tells here how much was sent, MPICH how much there was room for.
            sender, nbytes = self.global_ranks[status.Get_source()], status.Get_elements(MPI.BYTE)
            raise ShapeMismatch(
                f"recv: the message from rank {sender} ({nbytes} bytes or more) is longer than the tensor"
            ) from exc
        return (status.Get_source(), status.Get_elements(MPI.BYTE)) if done else None

    @mpi_call("Cancel")
    def cancel(self, request: Request, memory: object) -> None:
        """Cancel a receive; where a message for it is already coming in, `memory` is kept until it has."""
        native_request = cast(MPI.Request, request)
        native_request.Cancel()
        if not native_request.Test():
            self.abandon([request], memory)

    @mpi_call("Send_init")
    def persistent(self, send: bytearray, dst: int, recv: bytearray, src: int, tag: int) -> list[Request]:
        """Prepare an exchange of two small fixed buffers that is started again and again."""
        return [self.comm.Recv_init(recv, src, tag), self.comm.Send_init(send, dst, tag)]

    @mpi_call("Iprobe")
    def progress(self) -> None:
        """Let MPI make progress, on any communicator."""
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    @mpi_call("Iprobe")
    def probe(self, tag: int | None = None) -> tuple[int, int, int] | None:
        """Return (source rank, tag, bytes) of a message that waits to be received, None if there is none."""
        status = MPI.Status()
        if not self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG if tag is None else tag, status):
            return None
        return status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)

    def abandon(self, requests: Sequence[Request], memory: object) -> None:
        """Abandon requests. MPI may still write to their memory, which is kept; see `free_abandoned`."""
        _abandoned.append((cast("list[MPI.Request]", list(requests)), memory))

    def keep(self, memory: object) -> None:
        """Keep something until the process ends: MPI may be in the middle of something in it."""
        _kept.append(memory)

    @mpi_call("Request_free")
    def release(self, requests: Sequence[Request]) -> None:
        """Free a prepared exchange that is over."""
        for request in cast("Sequence[MPI.Prequest]", requests):
            request.Free()

    @mpi_call("Startall")
    def start(self, requests: list[Request]) -> None:
        """Start a prepared exchange."""
        MPI.Prequest.Startall(cast("list[MPI.Prequest]", requests))

    # -- MPI's own collectives ----------------------------------------------------------------------

    @mpi_call("Barrier", collective=True, blocks=True)
    def barrier(self) -> None:
        """Wait inside MPI until every rank is here."""
        self.comm.Barrier()

    @mpi_call("Ibarrier", collective=True)
    def barrier_request(self) -> Request:
        """Start a barrier, which is over on a rank once all ranks have started it."""
        return self.comm.Ibarrier()

    @mpi_call("Bcast", collective=True, blocks=True)
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy root's bytes into everyone's `tensor`."""
        self.given_bytes["Bcast"] += tensor.nbytes
        self.comm.Bcast(spec(tensor), root)

    @mpi_call("Allreduce", collective=True, blocks=True)
    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Combine `tensor` [n] over the ranks, in place."""
        self.given_bytes["Allreduce"] += tensor.nbytes
        mpi_op, mpi_type = native(op, tensor.dtype)
        for piece in pieces(tensor):
            self.comm.Allreduce(MPI.IN_PLACE, [address(piece), piece.numel(), mpi_type], mpi_op)

    @mpi_call("Reduce", collective=True, blocks=True)
    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Combine `tensor` [n] over the ranks into root's; the others keep theirs."""
        self.given_bytes["Reduce"] += tensor.nbytes
        mpi_op, mpi_type = native(op, tensor.dtype)
        for piece in pieces(tensor):
            spec = [address(piece), piece.numel(), mpi_type]
            if self.rank == root:
                self.comm.Reduce(MPI.IN_PLACE, spec, mpi_op, root)
            else:
                self.comm.Reduce(spec, None, mpi_op, root)

    @mpi_call("Allgather", collective=True, blocks=True)
    def all_gather(self, out: Tensor, tensor: Tensor | None) -> None:
        """Put everyone's `tensor` [n] into `out` [size * n]; None: mine is already in its place there."""
        self.given_bytes["Allgather"] += out.nbytes // self.size
        mine = MPI.IN_PLACE if tensor is None else spec(tensor)
        self.comm.Allgather(mine, spec(out, self.size))

    @mpi_call("Iallgather", collective=True)
    def all_gather_request(self, out: Tensor, tensor: Tensor) -> Request:
        """Start an all-gather of `tensor` [n] into `out` [size * n]; both must live until it is over."""
        return self.comm.Iallgather(spec(tensor), spec(out, self.size))

    @mpi_call("Gather", collective=True, blocks=True)
    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put everyone's `tensor` [n] into root's `out` [size * n]."""
        self.comm.Gather(spec(tensor), None if out is None else spec(out, self.size), root)

    @mpi_call("Scatter", collective=True, blocks=True)
    def scatter(self, tensor: Tensor, source: Tensor | None, root: int) -> None:
        """Hand piece r of root's `source` [size * n] to rank r's `tensor` [n]."""
        self.comm.Scatter(None if source is None else spec(source, self.size), spec(tensor), root)

    @mpi_call("Alltoall", collective=True, blocks=True)
    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Hand piece r of `tensor` [size * n] to rank r; piece s of `out` [size * n] comes from rank s."""
        self.given_bytes["Alltoall"] += tensor.nbytes
        self.comm.Alltoall(spec(tensor, self.size), spec(out, self.size))

    @mpi_call("bcast", collective=True, blocks=True)
    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return root's object, sent pickled."""
        return self.comm.bcast(obj, root)

    @mpi_call("allgather", collective=True, blocks=True)
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object, sent pickled."""
        return self.comm.allgather(obj)

    @mpi_call("gather", collective=True, blocks=True)
    def gather_object(self, obj: Any, root: int) -> list[Any] | None:
        """Return everyone's object on root, None elsewhere."""
        return self.comm.gather(obj, root)

    @mpi_call("scatter", collective=True, blocks=True)
    def scatter_object(self, objs: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of root's list."""
        return self.comm.scatter(objs, root)


def as_mpi(communicator: GroupCommunicator) -> Communicator:
    """Return a communicator as the one of MPI that it is, for what only MPI has."""
    assert isinstance(communicator, Communicator), f"{communicator!r} is no communicator of MPI"
    return communicator


def _global_ranks(comm: MPI.Intracomm, parent: Communicator | None) -> tuple[int, ...]:
    """Return the job's ranks that those of `comm` are, which was made of `parent`'s; None: the job's own."""
    if parent is None:
        return tuple(range(comm.Get_size()))
    mine = comm.Get_group()
    places = _places(mine, parent.comm)
    mine.Free()
    return tuple(parent.global_ranks[place] for place in places)


def _places(group: MPI.Group, comm: MPI.Intracomm) -> list[int]:
    """Return the ranks that the members of `group` have in `comm`, in order of their ranks in `group`."""
    theirs = comm.Get_group()
    places = list(MPI.Group.Translate_ranks(group, range(group.Get_size()), theirs))
    theirs.Free()
    return places


def _intra(comm: MPI.Comm) -> MPI.Intracomm:
    """Return `comm`, which mpi4py's types know to be some communicator only."""
    assert isinstance(comm, MPI.Intracomm)
    return comm
