"""The one module that imports mpi4py: it starts MPI, and speaks to it in raw memory.

Importing this module starts MPI, so it is imported by `init()` alone, after the defaults of
`mpisgd.config` are in the environment. All others get a `Wire` handed to them.

Tensors travel by address. `tensor.numpy()` would mark the storage as not resizable, which breaks code that
frees and refills storages (FSDP does); an address has no such effect, but it holds no reference either:
whoever starts a transfer keeps the tensor until it is done.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from mpisgd import config
from mpisgd.comm import waiting
from mpisgd.comm.diagnosis.waits import inside
from mpisgd.errors import CollectiveTimeout, MpiFailed, MpisgdError, PeerLost, ShapeMismatch, UnsupportedOp

__all__ = [
    "MPI",
    "OVERDUE",
    "Wire",
    "let_go",
    "library_version",
    "parent",
    "progress",
    "revoke_all",
    "set_apart",
    "start",
    "survives_losses",
    "thread_level",
]

OVERDUE = (
    "a call of another rank was blocked inside MPI for longer than its time limit, as its report says; no "
    "group can be used any more"
)
# MPI counts elements in a C int. Bytes beyond it travel as one element of a datatype that spans them all.
MAX_COUNT = 2**31 - 1
SPAN_BLOCK = 2**20
# Reductions need MPI's own element types, so long tensors are reduced in pieces of this many elements.
MAX_REDUCE_COUNT = 2**28

ELEMENT_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
OPERATIONS = {
    "SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}
_KINDS: dict[int, type[MpisgdError]] = {
    MPI.ERR_TRUNCATE: ShapeMismatch,
    **{
        code: PeerLost
        for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        if (code := getattr(MPI, name, MPI.UNDEFINED)) != MPI.UNDEFINED
    },
}

BufferSpec = list[MPI.buffer | int | MPI.Datatype]

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate["Wire", P], R]


def start() -> bool:
    """Start MPI unless it runs already; return whether this call (or this import) started it."""
    if MPI.Is_finalized():
        raise MpiFailed("MPI is already finalized in this process: it cannot be started a second time")
    if MPI.Is_initialized():
        return False
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return True


def survives_losses() -> bool:
    """Return whether this job outlives the loss of a rank: an MPI that can, started so that it does."""
    try:
        MPI.COMM_SELF.Get_failed().Free()
    except (AttributeError, NotImplementedError, MPI.Exception):
        return False
    return not library_version().startswith("Open MPI") or config.fault_tolerance()


def revoke_all() -> None:
    """End whatever goes on over any wire, here and on all other ranks that it reaches; nothing waits for it.

    Every rank that was lost may have left others in the middle of anything, on communicators that not all
    of them have finished making.
    """
    for wire in list(_wires):
        wire.revoke()


def progress() -> None:
    """Let MPI do what is to be done, messages and heartbeats; nothing where it has ended."""
    if not MPI.Is_finalized():
        MPI.COMM_SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def let_go() -> None:
    """Free the memory of requests that were given up, as far as MPI is done with it."""
    _abandoned[:] = [entry for entry in _abandoned if not _are_over(entry[0])]


def _are_over(requests: Sequence[MPI.Request]) -> bool:
    return all(_is_over(request) for request in requests)


def _is_over(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as exc:
        return exc.Get_error_class() != getattr(MPI, "ERR_PROC_FAILED_PENDING", MPI.UNDEFINED)


def set_apart(wire: "Wire | None") -> None:
    """Let this wire, a duplicate set apart from `revoke_all`, tell why others are revoked.

    It is revoked by itself, before all others, where that is not done for a loss: a rank has been blocked
    inside MPI for longer than its time limit. MPI's messages keep their order, so whoever finds anything
    revoked knows by this one why.
    """
    global _apart
    _apart = wire


def parent() -> "Wire | None":
    """Return the way to the ranks that have spawned this process; None where `mpirun` has started it."""
    comm = MPI.Comm.Get_parent()
    return None if comm == MPI.COMM_NULL else Wire(comm)


def library_version() -> str:
    """Return the first line of what the MPI library calls itself."""
    return MPI.Get_library_version().splitlines()[0].strip().rstrip("\0")


def thread_level() -> str:
    """Return the thread level MPI runs at: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    return THREAD_LEVELS[MPI.Query_thread()]


@functools.lru_cache(maxsize=256)
def _span(nbytes: int) -> MPI.Datatype:
    """Return a committed datatype of exactly `nbytes` bytes, kept for the next time."""
    blocks, rest = divmod(nbytes, SPAN_BLOCK)
    block = MPI.BYTE.Create_contiguous(SPAN_BLOCK)
    body = block.Create_contiguous(blocks)
    whole = MPI.Datatype.Create_struct([1, rest], [0, blocks * SPAN_BLOCK], [body, MPI.BYTE])
    block.Free()
    body.Free()
    return whole.Commit()


def _address(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _spec(tensor: Tensor, parts: int = 1) -> BufferSpec:
    """Describe a tensor to MPI as bytes; `parts`: how many equal pieces MPI will see in it.

    The size of a piece decides, so that both sides of a transfer use the same datatype: Intel MPI 2021.18
    delivers wrong bytes where an all-gather sends bytes and receives a datatype of as many.
    """
    nbytes = tensor.nbytes // parts
    if nbytes <= MAX_COUNT:
        return [_address(tensor), nbytes, MPI.BYTE]
    return [_address(tensor), 1, _span(nbytes)]


def _wrapped(
    what: str, *, collective: bool = False, blocks: bool = False
) -> Callable[[Method[P, R]], Method[P, R]]:
    """Turn mpi4py's exceptions into ours, once; count the calls of MPI's own collectives.

    Those that wait for other ranks inside MPI, where nobody can end that, are noted as long as they last.
    """

    def decorate(method: Method[P, R]) -> Method[P, R]:
        def wrapped(self: "Wire", /, *args: P.args, **kwargs: P.kwargs) -> R:
            if collective:
                self.calls[what] += 1
            try:
                return method(self, *args, **kwargs)
            except MPI.Exception as exc:
                raise _ours(what, exc) from exc

        def blocking(self: "Wire", /, *args: P.args, **kwargs: P.kwargs) -> R:
            thread = threading.get_ident()
            inside[thread] = (what, time.monotonic())
            try:
                return wrapped(self, *args, **kwargs)
            finally:
                inside.pop(thread, None)

        outer = blocking if blocks else wrapped
        functools.update_wrapper(outer, method)
        return outer

    return decorate


def _ours(what: str, exc: MPI.Exception) -> MpisgdError:
    """Return the error of ours that says what MPI's has said of its call `what`."""
    if _apart is not None and _apart.is_revoked():  # what MPI calls it then is not always "revoked"
        why = waiting.vain()
        return CollectiveTimeout(f"MPI {what}: {why if isinstance(why, CollectiveTimeout) else OVERDUE}")
    return _KINDS.get(exc.Get_error_class(), MpiFailed)(f"MPI {what}: {exc.Get_error_string()}")


_wires: "weakref.WeakSet[Wire]" = weakref.WeakSet()
# Requests that were given up, with their memory, which MPI may write to even when their wire is no more.
_abandoned: list[tuple[list[MPI.Request], object]] = []
_apart: "Wire | None" = None


class Wire:
    """One MPI communicator, spoken to in the memory of contiguous tensors; counts what it sends.

    Every method takes contiguous CPU tensors and ranks of this communicator. Requests belong to the
    caller, who also keeps the tensors alive until they are complete.

    Attributes:
        sent_bytes: payload handed to MPI's point-to-point sends by this rank.
        sent_messages: number of those sends.
        calls: how often each of MPI's own collectives was called.
        global_ranks: what its ranks are called in messages: the job's ranks.
    """

    def __init__(self, comm: Any, parent: "Wire | None" = None, *, apart: bool = False) -> None:
        self.comm: MPI.Intracomm = comm
        self.global_ranks = _global_ranks(comm, parent)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.sent_bytes = 0
        self.sent_messages = 0
        self.calls: Counter[str] = Counter()
        self.tag_limit: int = comm.Get_attr(MPI.TAG_UB) or 32767
        if not apart:
            _wires.add(self)

    # -- life of the communicator -------------------------------------------------------------------

    @_wrapped("Comm_dup", blocks=True)
    def duplicate(self, *, apart: bool = False) -> "Wire":
        """Return a wire of its own over the same ranks. Collective.

        Args:
            apart: whether `revoke_all` spares it.
        """
        return Wire(_intra(self.comm.Dup()), self, apart=apart)

    @_wrapped("Comm_split", blocks=True)
    def subset(self, ranks: Sequence[int]) -> "Wire | None":
        """Return a wire over `ranks` in the order given, None on the others. Collective over this wire."""
        color = 0 if self.rank in ranks else MPI.UNDEFINED
        key = ranks.index(self.rank) if self.rank in ranks else 0
        comm = self.comm.Split(color, key)
        return None if comm == MPI.COMM_NULL else Wire(_intra(comm), self)

    @_wrapped("Comm_create_group", blocks=True)
    def among(self, ranks: Sequence[int], tag: int) -> "Wire":
        """Return a wire over `ranks` in the order given. Collective over them alone.

        Args:
            ranks: of this wire, this one among them.
            tag: keeps apart what threads or overlapping sets of ranks ask for at the same time.
        """
        members = self.comm.Get_group().Incl(list(ranks))
        comm = self.comm.Create_group(members, tag)
        members.Free()
        return Wire(comm, self)

    @_wrapped("Comm_split", blocks=True)
    def split(self, color: int) -> "Wire":
        """Return a wire over the ranks that give the same `color`, ordered as here. Collective."""
        return Wire(_intra(self.comm.Split(color, self.rank)), self)

    @_wrapped("Comm_split_type", blocks=True)
    def same_host(self) -> "Wire":
        """Return a wire over the ranks that share this rank's host. Collective."""
        return Wire(_intra(self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)), self)

    @_wrapped("Comm_free", blocks=True)
    def free(self) -> None:
        """Give the communicator back. Collective."""
        _wires.discard(self)
        self.comm.Free()

    def abort(self, exit_code: int) -> None:
        """End every process of the job."""
        self.comm.Abort(exit_code)

    # -- where a rank was lost (ULFM) ---------------------------------------------------------------

    def lost(self) -> list[int]:
        """Return the ranks of this wire that are known to be gone. Looking lets MPI notice it."""
        with contextlib.suppress(MpisgdError):
            self.progress()
        failed = self.comm.Get_failed()
        if not failed.size:
            return []
        return sorted(failed.Translate_ranks(range(failed.size), self.comm.Get_group()))

    def revoke(self) -> None:
        """End whatever goes on over this wire, on every rank."""
        with contextlib.suppress(MPI.Exception):
            self.comm.Revoke()

    def is_revoked(self) -> bool:
        """Return whether a rank has revoked it."""
        return self.comm.Is_revoked()

    @_wrapped("Shrink", blocks=True)
    def shrink(self) -> "Wire":
        """Return a wire over the ranks that are left, in their order. Collective over these."""
        return Wire(self.comm.Shrink())

    @_wrapped("Agree", blocks=True)
    def agree(self, holds: bool) -> bool:
        """Return, alike on all ranks that are left, whether it `holds` on each and no other has been lost."""
        try:
            return bool(self.comm.Agree(int(holds)))
        except MPI.Exception:
            return False

    def acknowledge(self) -> None:
        """Take note of the ranks known to be lost: the next `agree` need not tell of them again."""
        self.comm.Ack_failed()

    @_wrapped("Spawn", blocks=True)
    def spawn(self, command: Sequence[str], number: int, env: Mapping[str, str]) -> "Wire":
        """Start more processes and return the way to them. Collective; waits until they have started MPI."""
        info = MPI.Info.Create()
        info.Set("PMIX_ENVAR", "\n".join(f"{name}={value}" for name, value in env.items()))
        comm = self.comm.Spawn(command[0], list(command[1:]), number, info, 0)
        info.Free()
        return Wire(comm)

    @_wrapped("Intercomm_merge", blocks=True)
    def merge(self, *, behind: bool) -> "Wire":
        """Return a wire over both sides of this one, and give this one back. Collective.

        Args:
            behind: whether my side comes last.
        """
        comm: Any = self.comm
        merged = Wire(comm.Merge(behind))
        _wires.discard(self)
        comm.Disconnect()  # else MPI's end crashes in Open MPI 5.0
        return merged

    # -- point to point -----------------------------------------------------------------------------

    @_wrapped("Isend")
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MPI.Request:
        """Start sending `tensor` to `dst`."""
        self.sent_bytes += tensor.nbytes
        self.sent_messages += 1
        return self.comm.Isend(_spec(tensor), dst, tag)

    @_wrapped("Irecv")
    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> MPI.Request:
        """Start receiving into `tensor` from `src`, None for whoever sends first."""
        return self.comm.Irecv(_spec(tensor), MPI.ANY_SOURCE if src is None else src, tag)

    @_wrapped("Testall")
    def poll(self, requests: Sequence[MPI.Request]) -> bool:
        """Return whether all of `requests` are complete, and let MPI make progress."""
        return MPI.Request.Testall(requests)

    @_wrapped("Test")
    def poll_one(self, request: MPI.Request) -> tuple[int, int] | None:
        """Return (source rank, bytes received) once `request` is complete, None before."""
        status = MPI.Status()
        return (status.Get_source(), status.Get_elements(MPI.BYTE)) if request.Test(status) else None

    @_wrapped("Cancel")
    def cancel(self, request: MPI.Request) -> None:
        """Give up a receive that nobody answered."""
        request.Cancel()
        request.Free()

    @_wrapped("Send_init")
    def persistent(
        self, send: bytearray, dst: int, recv: bytearray, src: int, tag: int
    ) -> list[MPI.Prequest]:
        """Prepare an exchange of two small fixed buffers that is started again and again."""
        return [self.comm.Recv_init(recv, src, tag), self.comm.Send_init(send, dst, tag)]

    @_wrapped("Iprobe")
    def progress(self) -> None:
        """Let MPI move whatever is under way, on any communicator."""
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    @_wrapped("Iprobe")
    def probe(self) -> tuple[int, int, int] | None:
        """Return (source rank, tag, bytes) of a message that waits to be received, None if there is none."""
        status = MPI.Status()
        if not self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            return None
        return status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)

    def abandon(self, requests: Sequence[MPI.Request], memory: object) -> None:
        """Give requests up. MPI may still write to their memory, which is kept until `let_go`."""
        _abandoned.append((list(requests), memory))

    @_wrapped("Startall")
    def start(self, requests: list[MPI.Prequest]) -> None:
        """Start a prepared exchange."""
        MPI.Prequest.Startall(requests)

    # -- MPI's own collectives ----------------------------------------------------------------------

    @_wrapped("Barrier", collective=True, blocks=True)
    def barrier(self) -> None:
        """Wait inside MPI until every rank is here."""
        self.comm.Barrier()

    @_wrapped("Ibarrier", collective=True)
    def barrier_request(self) -> MPI.Request:
        """Start a barrier, which is over on a rank once all ranks have started it."""
        return self.comm.Ibarrier()

    @_wrapped("Bcast", collective=True, blocks=True)
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy root's bytes into everyone's `tensor`."""
        self.comm.Bcast(_spec(tensor), root)

    @_wrapped("Allreduce", collective=True, blocks=True)
    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Combine `tensor` [n] over the ranks, in place."""
        mpi_op, mpi_type = _native(op, tensor.dtype)
        for piece in _pieces(tensor):
            self.comm.Allreduce(MPI.IN_PLACE, [_address(piece), piece.numel(), mpi_type], mpi_op)

    @_wrapped("Reduce", collective=True, blocks=True)
    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Combine `tensor` [n] over the ranks into root's; the others keep theirs."""
        mpi_op, mpi_type = _native(op, tensor.dtype)
        for piece in _pieces(tensor):
            spec = [_address(piece), piece.numel(), mpi_type]
            if self.rank == root:
                self.comm.Reduce(MPI.IN_PLACE, spec, mpi_op, root)
            else:
                self.comm.Reduce(spec, None, mpi_op, root)

    @_wrapped("Allgather", collective=True, blocks=True)
    def all_gather(self, out: Tensor, tensor: Tensor | None) -> None:
        """Put everyone's `tensor` [n] into `out` [size * n]; None: mine is already in its place there."""
        mine = MPI.IN_PLACE if tensor is None else _spec(tensor)
        self.comm.Allgather(mine, _spec(out, self.size))

    @_wrapped("Gather", collective=True, blocks=True)
    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put everyone's `tensor` [n] into root's `out` [size * n]."""
        self.comm.Gather(_spec(tensor), None if out is None else _spec(out, self.size), root)

    @_wrapped("Scatter", collective=True, blocks=True)
    def scatter(self, tensor: Tensor, source: Tensor | None, root: int) -> None:
        """Hand piece r of root's `source` [size * n] to rank r's `tensor` [n]."""
        self.comm.Scatter(None if source is None else _spec(source, self.size), _spec(tensor), root)

    @_wrapped("Alltoall", collective=True, blocks=True)
    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Hand piece r of `tensor` [size * n] to rank r; piece s of `out` [size * n] comes from rank s."""
        self.comm.Alltoall(_spec(tensor, self.size), _spec(out, self.size))

    @_wrapped("bcast", collective=True, blocks=True)
    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return root's object, pickled on the way."""
        return self.comm.bcast(obj, root)

    @_wrapped("allgather", collective=True, blocks=True)
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object, pickled on the way."""
        return self.comm.allgather(obj)

    @_wrapped("gather", collective=True, blocks=True)
    def gather_object(self, obj: Any, root: int) -> list[Any] | None:
        """Return everyone's object on root, None elsewhere."""
        return self.comm.gather(obj, root)

    @_wrapped("scatter", collective=True, blocks=True)
    def scatter_object(self, objs: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of root's list."""
        return self.comm.scatter(objs, root)


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces whose elements MPI can count."""
    if tensor.numel() <= MAX_REDUCE_COUNT:
        return [tensor]
    return [tensor[start : start + MAX_REDUCE_COUNT] for start in range(0, tensor.numel(), MAX_REDUCE_COUNT)]


def _global_ranks(comm: MPI.Intracomm, parent: Wire | None) -> tuple[int, ...]:
    """Return the job's ranks that those of `comm` are, which was made of `parent`'s; None: the job's own."""
    if parent is None:
        return tuple(range(comm.Get_size()))
    mine, theirs = comm.Get_group(), parent.comm.Get_group()
    places = MPI.Group.Translate_ranks(mine, range(comm.Get_size()), theirs)
    mine.Free()
    theirs.Free()
    return tuple(parent.global_ranks[place] for place in places)


def _intra(comm: MPI.Comm) -> MPI.Intracomm:
    """Return `comm`, which mpi4py's types know to be some communicator only."""
    assert isinstance(comm, MPI.Intracomm)
    return comm


def _native(op: str, dtype: torch.dtype) -> tuple[MPI.Op, MPI.Datatype]:
    """Return MPI's operation and element type. Never hands MPI what it does not know how to add."""
    if dtype not in ELEMENT_TYPES:
        raise UnsupportedOp(f"MPI has no arithmetic for {dtype}")
    return OPERATIONS[op], ELEMENT_TYPES[dtype]
