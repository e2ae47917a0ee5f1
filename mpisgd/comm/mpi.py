"""The one module that imports mpi4py: it starts MPI, and speaks to it in raw memory.

Importing this module starts MPI, so it is imported by `init()` alone, after the defaults of
`mpisgd.config` are in the environment. All others get a `Wire` handed to them.

Tensors travel by address. `tensor.numpy()` would mark the storage as not resizable, which breaks code that
frees and refills storages (FSDP does); an address has no such effect, but it holds no reference either:
whoever starts a transfer keeps the tensor until it is done.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpisgd.errors import MpiFailed, MpisgdError, PeerLost, ShapeMismatch, UnsupportedOp

__all__ = ["MPI", "Wire", "library_version", "start", "thread_level"]

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

BufferSpec = tuple[MPI.buffer, int, MPI.Datatype]


def start() -> bool:
    """Start MPI unless it runs already; return whether this call (or this import) started it."""
    if MPI.Is_finalized():
        raise MpiFailed("MPI is already finalized in this process: it cannot be started a second time")
    if MPI.Is_initialized():
        return False
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return True


def library_version() -> str:
    """Return the first line of what the MPI library calls itself."""
    return MPI.Get_library_version().splitlines()[0].strip().rstrip("\0")


def thread_level() -> str:
    """Return the thread level MPI runs at: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    return THREAD_LEVELS[MPI.Query_thread()]


def _span(nbytes: int) -> MPI.Datatype:
    """Return a committed datatype of exactly `nbytes` bytes; the caller frees it."""
    blocks, rest = divmod(nbytes, SPAN_BLOCK)
    block = MPI.BYTE.Create_contiguous(SPAN_BLOCK)
    body = block.Create_contiguous(blocks)
    whole = MPI.Datatype.Create_struct([1, rest], [0, blocks * SPAN_BLOCK], [body, MPI.BYTE])
    block.Free()
    body.Free()
    return whole.Commit()


def _address(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@contextlib.contextmanager
def _wrapped_errors(what: str) -> Iterator[None]:
    """Turn mpi4py's exception into ours, once."""
    try:
        yield
    except MPI.Exception as exc:
        raise _KINDS.get(exc.Get_error_class(), MpiFailed)(f"{what}: {exc.Get_error_string()}") from exc


class Wire:
    """One MPI communicator, spoken to in the memory of contiguous tensors; counts what it sends.

    Every method takes contiguous CPU tensors and ranks of this communicator. Requests belong to the
    caller, who also keeps the tensors alive until they are complete.

    Attributes:
        sent_bytes: payload handed to MPI's point-to-point sends by this rank.
        sent_messages: number of those sends.
        calls: how often each of MPI's own collectives was called.
        abandoned: requests that were given up, with their memory, which MPI may still write to.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.sent_bytes = 0
        self.sent_messages = 0
        self.calls: Counter[str] = Counter()
        self.abandoned: list[Any] = []
        self.tag_limit: int = comm.Get_attr(MPI.TAG_UB) or 32767

    # -- life of the communicator -------------------------------------------------------------------

    def duplicate(self) -> "Wire":
        """Return a wire of its own over the same ranks. Collective."""
        return Wire(_intra(self.comm.Dup()))

    def subset(self, ranks: Sequence[int]) -> "Wire | None":
        """Return a wire over `ranks` in the order given, None on the others. Collective over this wire."""
        color = 0 if self.rank in ranks else MPI.UNDEFINED
        key = ranks.index(self.rank) if self.rank in ranks else 0
        comm = self.comm.Split(color, key)
        return None if comm == MPI.COMM_NULL else Wire(_intra(comm))

    def same_host(self) -> "Wire":
        """Return a wire over the ranks that share this rank's host. Collective."""
        return Wire(_intra(self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)))

    def free(self) -> None:
        """Give the communicator back. Collective."""
        self.comm.Free()

    def abort(self, exit_code: int) -> None:
        """End every process of the job."""
        self.comm.Abort(exit_code)

    # -- memory -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _bytes(self, *tensors: Tensor, pieces: int = 1) -> Iterator[list[BufferSpec]]:
        """Describe the tensors to MPI as bytes; `pieces`: the equal parts MPI will see in the last one."""
        spans: list[MPI.Datatype] = []
        specs: list[BufferSpec] = []
        for i, tensor in enumerate(tensors):
            parts = pieces if i == len(tensors) - 1 else 1
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes <= MAX_COUNT:
                specs.append((_address(tensor), nbytes // parts, MPI.BYTE))
            else:
                spans.append(_span(nbytes // parts))
                specs.append((_address(tensor), 1, spans[-1]))
        try:
            yield specs
        finally:
            for span in spans:
                span.Free()  # MPI keeps it until pending transfers are done

    # -- point to point -----------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MPI.Request:
        """Start sending `tensor` to `dst`."""
        with _wrapped_errors(f"send to rank {dst}"), self._bytes(tensor) as (spec,):
            self.sent_bytes += tensor.numel() * tensor.element_size()
            self.sent_messages += 1
            return self.comm.Isend(list(spec), dst, tag)

    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> MPI.Request:
        """Start receiving into `tensor` from `src`, None for whoever sends first."""
        source = MPI.ANY_SOURCE if src is None else src
        with _wrapped_errors(f"receive from rank {src}"), self._bytes(tensor) as (spec,):
            return self.comm.Irecv(list(spec), source, tag)

    def poll(self, requests: Sequence[MPI.Request]) -> bool:
        """Return whether all of `requests` are complete, and let MPI make progress."""
        with _wrapped_errors("waiting for a transfer"):
            return MPI.Request.Testall(list(requests))

    def poll_one(self, request: MPI.Request) -> tuple[int, int] | None:
        """Return (source rank, bytes received) once `request` is complete, None before."""
        status = MPI.Status()
        with _wrapped_errors("waiting for a message"):
            if not request.Test(status):
                return None
        return status.Get_source(), status.Get_elements(MPI.BYTE)

    def cancel(self, request: MPI.Request) -> None:
        """Give up a receive that nobody answered."""
        request.Cancel()
        request.Free()

    def persistent(
        self, send: bytearray, dst: int, recv: bytearray, src: int, tag: int
    ) -> list[MPI.Prequest]:
        """Prepare an exchange of two small fixed buffers that is started again and again."""
        return [self.comm.Recv_init(recv, src, tag), self.comm.Send_init(send, dst, tag)]

    def start(self, requests: list[MPI.Prequest]) -> None:
        """Start a prepared exchange."""
        with _wrapped_errors("starting an exchange"):
            MPI.Prequest.Startall(requests)

    # -- MPI's own collectives ----------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait inside MPI until every rank is here."""
        with self._call("Barrier"):
            self.comm.Barrier()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy root's bytes into everyone's `tensor`."""
        with self._call("Bcast"), self._bytes(tensor) as (spec,):
            self.comm.Bcast(list(spec), root)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Combine `tensor` [n] over the ranks, in place."""
        mpi_op, mpi_type = _native(op, tensor.dtype)
        with self._call("Allreduce"):
            for piece in _pieces(tensor):
                self.comm.Allreduce(MPI.IN_PLACE, [_address(piece), piece.numel(), mpi_type], mpi_op)

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Combine `tensor` [n] over the ranks into root's; the others keep theirs."""
        mpi_op, mpi_type = _native(op, tensor.dtype)
        with self._call("Reduce"):
            for piece in _pieces(tensor):
                spec = [_address(piece), piece.numel(), mpi_type]
                if self.rank == root:
                    self.comm.Reduce(MPI.IN_PLACE, spec, mpi_op, root)
                else:
                    self.comm.Reduce(spec, None, mpi_op, root)

    def all_gather(self, out: Tensor, tensor: Tensor | None) -> None:
        """Put everyone's `tensor` [n] into `out` [size * n]; None: mine is already in its place there."""
        with self._call("Allgather"):
            if tensor is None:
                with self._bytes(out, pieces=self.size) as (spec,):
                    self.comm.Allgather(MPI.IN_PLACE, list(spec))
            else:
                with self._bytes(tensor, out, pieces=self.size) as (mine, spec):
                    self.comm.Allgather(list(mine), list(spec))

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put everyone's `tensor` [n] into root's `out` [size * n]."""
        with self._call("Gather"):
            if out is None:
                with self._bytes(tensor) as (mine,):
                    self.comm.Gather(list(mine), None, root)
            else:
                with self._bytes(tensor, out, pieces=self.size) as (mine, spec):
                    self.comm.Gather(list(mine), list(spec), root)

    def scatter(self, tensor: Tensor, source: Tensor | None, root: int) -> None:
        """Hand piece r of root's `source` [size * n] to rank r's `tensor` [n]."""
        with self._call("Scatter"):
            if source is None:
                with self._bytes(tensor) as (mine,):
                    self.comm.Scatter(None, list(mine), root)
            else:
                with self._bytes(tensor, source, pieces=self.size) as (mine, spec):
                    self.comm.Scatter(list(spec), list(mine), root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Hand piece r of `tensor` [size * n] to rank r; piece s of `out` [size * n] comes from rank s."""
        with (
            self._call("Alltoall"),
            self._bytes(tensor, pieces=self.size) as (give,),
            self._bytes(out, pieces=self.size) as (take,),
        ):
            self.comm.Alltoall(list(give), list(take))

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return root's object, pickled on the way."""
        with self._call("bcast"):
            return self.comm.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object, pickled on the way."""
        with self._call("allgather"):
            return self.comm.allgather(obj)

    def gather_object(self, obj: Any, root: int) -> list[Any] | None:
        """Return everyone's object on root, None elsewhere."""
        with self._call("gather"):
            return self.comm.gather(obj, root)

    def scatter_object(self, objs: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of root's list."""
        with self._call("scatter"):
            return self.comm.scatter(objs, root)

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[None]:
        self.calls[name] += 1
        with _wrapped_errors(f"MPI {name}"):
            yield


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces whose elements MPI can count."""
    if tensor.numel() <= MAX_REDUCE_COUNT:
        return [tensor]
    return [tensor[start : start + MAX_REDUCE_COUNT] for start in range(0, tensor.numel(), MAX_REDUCE_COUNT)]


def _intra(comm: MPI.Comm) -> MPI.Intracomm:
    """Return `comm`, which mpi4py's types know to be some communicator only."""
    assert isinstance(comm, MPI.Intracomm)
    return comm


def _native(op: str, dtype: torch.dtype) -> tuple[MPI.Op, MPI.Datatype]:
    """Return MPI's operation and element type. Never hands MPI what it does not know how to add."""
    if dtype not in ELEMENT_TYPES:
        raise UnsupportedOp(f"MPI has no arithmetic for {dtype}")
    return OPERATIONS[op], ELEMENT_TYPES[dtype]
