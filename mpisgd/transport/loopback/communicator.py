"""`LoopbackCommunicator`: what `mpisgd.transport.mpi.Communicator` is, among threads of one process.

Its collectives are meetings: each rank brings what it gives, waits for all, and takes what it gets from what
was brought. Reductions are computed in rank order.
"""

import ctypes
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.errors import JobError
from mpisgd.transport.loopback.mailbox import MessageMemory, Request
from mpisgd.transport.loopback.meeting import Agreement, Meeting
from mpisgd.transport.loopback.network import Context
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["LoopbackCommunicator"]

TAG_LIMIT = 2**31 - 1


class LoopbackCommunicator:
    """One communicator as one rank sees it.

    Args:
        context: what its ranks share.
        rank: this one among them.

    Attributes:
        context: as given.
        process: which rank of the job this one was at its start; losses do not change it.
        global_ranks: the job's ranks that they are.
        sent_bytes: payload of this rank's messages.
        sent_messages: number of these.
        calls: how often each collective was called.
        given_bytes: what this rank has given to each.
    """

    def __init__(
        self,
        context: Context,
        rank: int,
        parent: "LoopbackCommunicator | None" = None,
        *,
        apart: bool = False,
    ) -> None:
        self.context = context
        self.rank = rank
        self.size = len(context.ranks)
        self.global_ranks = context.names
        self.sent_bytes = self.sent_messages = 0
        self.calls: Counter[str] = Counter()
        self.given_bytes: Counter[str] = Counter()
        self.tag_limit = TAG_LIMIT
        self.only_thread: int | None = None
        self._network = context.network
        self.process = context.ranks[rank]
        self._traffic = context.network.traffic[self.process]
        self._num_meetings = self._num_agreements = 0
        self._num_apart: Counter[Any] = Counter()
        self._acknowledged: frozenset[int] = frozenset()
        of_rank = context.network.communicators[self.process]
        self._family: dict[Any, None] = {} if apart else of_rank if parent is None else parent._family
        self._family[self] = None

    # -- meetings -----------------------------------------------------------------------------------

    def _begin(self, kind: str, mine: Any) -> Meeting:
        self.context.check(self.rank)
        meeting = self.context.meeting(self._num_meetings, kind)
        self._num_meetings += 1
        self.calls[kind] += 1
        self._traffic.call()
        meeting.bring(kind, self.rank, mine)
        self.context.has_come(meeting, range(self.size))
        return meeting

    def _is_over(self, meeting: Meeting) -> bool:
        if not meeting.is_complete():
            self.context.check(self.rank)
            return False
        return True

    def _meet(self, kind: str, mine: Any) -> Meeting:
        """Come with something, and wait for all."""
        meeting = self._begin(kind, mine)
        self._network.wait(
            lambda: self._is_over(meeting), lambda: f"{kind} of the ranks {list(self.global_ranks)}"
        )
        return meeting

    def _context_of(
        self, meeting: Meeting | Agreement, key: Any, members: Sequence[int], *, apart: bool = False
    ) -> "LoopbackCommunicator":
        """Return my part of a new communicator over these of my ranks, which the first that asks makes."""
        if key not in meeting.made:
            ranks = [self.context.ranks[member] for member in members]
            names = [self.global_ranks[member] for member in members]
            meeting.made[key] = Context(self._network, ranks, names)
        return LoopbackCommunicator(meeting.made[key], members.index(self.rank), self, apart=apart)

    # -- life of the communicator -------------------------------------------------------------------

    def duplicate(self, *, apart: bool = False) -> "LoopbackCommunicator":
        """Return a communicator of its own over the same ranks. Collective.

        Args:
            apart: whether the revocation of all communicators spares it, and all that are made of it.
        """
        return self._context_of(self._meet("Comm_dup", None), None, range(self.size), apart=apart)

    def subset(self, ranks: Sequence[int], *, apart: bool = False) -> "LoopbackCommunicator | None":
        """Return a communicator over `ranks` in that order, None on the others. Collective over this one."""
        meeting = self._meet("Comm_split", None)
        return self._context_of(meeting, None, ranks, apart=apart) if self.rank in ranks else None

    def create_group(self, ranks: Sequence[int], tag: int, *, apart: bool = False) -> "LoopbackCommunicator":
        """Return a communicator over `ranks` in the order given. Collective over them alone."""
        self.context.check(self.rank, ranks)
        name = (tuple(ranks), tag)
        key = (*name, self._num_apart[name])
        self._num_apart[name] += 1
        meeting = self.context.meeting_apart(key, "Comm_create_group", len(ranks))
        self._traffic.call()
        meeting.bring("Comm_create_group", self.rank, None)
        self.context.has_come(meeting, ranks)

        def is_over() -> bool:
            if not meeting.is_complete():
                self.context.check(self.rank, ranks)
                return False
            return True

        self._network.wait(is_over, lambda: f"Comm_create_group of the ranks {list(ranks)}")
        return self._context_of(meeting, None, list(ranks), apart=apart)

    def split(self, color: int) -> "LoopbackCommunicator":
        """Return a communicator over the ranks that give the same `color`, ordered as here. Collective."""
        meeting = self._meet("Comm_split", color)
        if "members" not in meeting.made:
            members: dict[int, list[int]] = {}
            for rank, other in enumerate(meeting.all):
                members.setdefault(other, []).append(rank)
            meeting.made["members"] = members
        return self._context_of(meeting, color, meeting.made["members"][color])

    def same_host(self) -> "LoopbackCommunicator":
        """Return a communicator over the ranks that share this rank's host. Collective."""
        return self.split(self._network.hosts[self.process])

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._meet("Comm_free", None)
        self._family.pop(self, None)

    def abort(self, exit_code: int) -> None:
        """End the job."""
        raise JobError("the job was aborted", exit_code)

    # -- where a rank was lost, as ULFM has it ------------------------------------------------------

    def lost(self) -> list[int]:
        """Return the ranks of this communicator that this one knows to be gone."""
        self.progress()
        known = self._network.known[self.process]
        return [place for place, rank in enumerate(self.context.ranks) if rank in known]

    def revoke(self) -> None:
        """End whatever goes on over this communicator, on every rank."""
        self._network.revoke([self.context], self.process)

    def revoke_family(self) -> None:
        """End whatever goes on over this communicator, which is apart, and those that were made of it."""
        self._network.revoke([each.context for each in self._family], self.process)

    def is_revoked(self) -> bool:
        """Return whether a rank has revoked it, as far as is known here."""
        return self.rank in self.context.revoked

    def acknowledge(self) -> None:
        """Take note of the ranks known to be lost: the next `agree` need not tell of them again."""
        self._acknowledged = frozenset(self._network.known[self.process])

    def agree(self, holds: bool) -> bool:
        """Return, alike on all ranks that are left, whether it `holds` on each and no other has been lost."""
        return self._agree("Agree", holds).outcome()

    def shrink(self) -> "LoopbackCommunicator":
        """Return a communicator over the ranks that are left, in their order. Collective over these."""
        agreement = self._agree("Shrink", True)
        if None not in agreement.made:
            left = [self.context.ranks[place] for place in agreement.left]
            agreement.made[None] = Context(self._network, left, range(len(left)))
        return LoopbackCommunicator(agreement.made[None], agreement.left.index(self.rank))

    def _agree(self, kind: str, holds: bool) -> Agreement:
        agreement = self.context.agreement(self._num_agreements, kind)
        self._num_agreements += 1
        self._traffic.call()
        agreement.bring(kind, self.rank, holds, self._acknowledged)
        self._network.agree(self.context, agreement, self.process)
        return agreement

    # -- point to point -----------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Request:
        """Start sending `tensor` to `dst`."""
        self.sent_bytes += tensor.nbytes
        self.sent_messages += 1
        return self.context.send(self.rank, dst, tag, MessageMemory.of(tensor))

    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> Request:
        """Start receiving into `tensor` from `src`, None for whoever sends first."""
        return self.context.receive(self.rank, src, tag, MessageMemory.of(tensor))

    def poll(self, requests: Sequence[Any]) -> bool:
        """Return whether all of `requests` are complete."""
        self.progress()
        over = [request.test() for request in requests]  # each moves along
        return all(over)

    def poll_one(self, request: Any) -> tuple[int, int] | None:
        """Return (source rank, bytes received) once `request` is complete, None before."""
        self.progress()
        return (request.source, request.nbytes) if request.test() else None

    def cancel(self, request: Any, memory: object) -> None:
        """Cancel a receive."""
        self.context.cancel(self.rank, request)

    def persistent(self, send: bytearray, dst: int, recv: bytearray, src: int, tag: int) -> list[Any]:
        """Prepare an exchange of two small fixed buffers that is started again and again."""
        sent, received = MessageMemory.of(send), MessageMemory.of(recv)
        return [
            _Prepared(lambda: self.context.receive(self.rank, src, tag, received)),
            _Prepared(lambda: self.context.send(self.rank, dst, tag, sent)),
        ]

    def start(self, requests: list[Any]) -> None:
        """Start a prepared exchange."""
        for request in requests:
            request.start()

    def release(self, requests: Sequence[Any]) -> None:
        """Free a prepared exchange that is over."""

    def abandon(self, requests: Sequence[Any], memory: object) -> None:
        """Abandon requests: what they receive still comes."""

    def keep(self, memory: object) -> None:
        """Nothing: nobody writes to memory but as a request says, which keeps it."""

    def progress(self) -> None:
        """Receive what has arrived, on any communicator."""
        self._network.progress(self.process)

    def probe(self, tag: int | None = None) -> tuple[int, int, int] | None:
        """Return (source rank, tag, bytes) of a message that waits to be received, None if there is none."""
        message = self.context.waiting(self.rank, tag)
        return None if message is None else (message.src, message.tag, message.memory.nbytes)

    # -- collectives --------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._meet("Barrier", None)

    def barrier_request(self) -> Request:
        """Start a barrier, which is over on a rank once all ranks have started it."""
        meeting = self._begin("Ibarrier", None)
        return Request(lambda: self._is_over(meeting))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy root's bytes into everyone's `tensor`."""
        self.given_bytes["Bcast"] += tensor.nbytes
        self._traffic.move(tensor.nbytes)
        given = self._meet("Bcast", MessageMemory.of(tensor).copy() if self.rank == root else None).brought[
            root
        ]
        if self.rank != root:
            MessageMemory.of(tensor).fill_from(given)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Combine `tensor` [n] over the ranks, in place."""
        self.given_bytes["Allreduce"] += tensor.nbytes
        self._traffic.move(2 * tensor.nbytes)
        tensor.copy_(_combined(self._meet("Allreduce", tensor.clone()).all, op))

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Combine `tensor` [n] over the ranks into root's; the others keep theirs."""
        self.given_bytes["Reduce"] += tensor.nbytes
        self._traffic.move(tensor.nbytes)
        brought = self._meet("Reduce", tensor.clone()).all
        if self.rank == root:
            tensor.copy_(_combined(brought, op))

    def all_gather(self, out: Tensor, tensor: Tensor | None) -> None:
        """Put everyone's `tensor` [n] into `out` [size * n]; None: mine is already in its place there."""
        self.given_bytes["Allgather"] += out.nbytes // self.size
        self._traffic.move(out.nbytes)
        mine = _parts(out, self.size)[self.rank] if tensor is None else tensor
        _fill(out, self._meet("Allgather", _bytes(mine)))

    def all_gather_request(self, out: Tensor, tensor: Tensor) -> Request:
        """Start an all-gather of `tensor` [n] into `out` [size * n]; both must live until it is over."""
        self._traffic.move(out.nbytes)
        meeting = self._begin("Iallgather", _bytes(tensor))

        def test() -> bool:
            if not self._is_over(meeting):
                return False
            _fill(out, meeting)
            return True

        return Request(test)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put everyone's `tensor` [n] into root's `out` [size * n]."""
        self._traffic.move(tensor.nbytes if out is None else out.nbytes)
        meeting = self._meet("Gather", _bytes(tensor))
        if out is not None and self.rank == root:
            _fill(out, meeting)

    def scatter(self, tensor: Tensor, source: Tensor | None, root: int) -> None:
        """Hand piece r of root's `source` [size * n] to rank r's `tensor` [n]."""
        pieces = (
            [MessageMemory.of(part).copy() for part in _parts(source, self.size)]
            if source is not None
            else None
        )
        self._traffic.move(tensor.nbytes if source is None else source.nbytes)
        MessageMemory.of(tensor).fill_from(self._meet("Scatter", pieces).brought[root][self.rank])

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Hand piece r of `tensor` [size * n] to rank r; piece s of `out` [size * n] comes from rank s."""
        self.given_bytes["Alltoall"] += tensor.nbytes
        self._traffic.move(2 * tensor.nbytes)
        everyones = self._meet("Alltoall", _bytes(tensor)).all
        nbytes = tensor.nbytes // self.size
        mine = slice(self.rank * nbytes, (self.rank + 1) * nbytes)
        given = b"".join([theirs[mine] for theirs in everyones])
        ctypes.memmove(out.data_ptr(), given, len(given))

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return root's object, sent pickled."""
        mine = pickle.dumps(obj) if self.rank == root else b""
        given = self._meet("bcast", mine).brought[root]
        self._traffic.move(len(given))
        return obj if self.rank == root else pickle.loads(given)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object, sent pickled."""
        meeting = self._meet("allgather", pickle.dumps(obj))
        self._traffic.move(meeting.num_bytes)
        gathered: list[Any] = meeting.all_pickled()
        return gathered

    def gather_object(self, obj: Any, root: int) -> list[Any] | None:
        """Return everyone's object on root, None elsewhere."""
        mine = pickle.dumps(obj)
        meeting = self._meet("gather", mine)
        self._traffic.move(meeting.num_bytes if self.rank == root else len(mine))
        return meeting.all_pickled() if self.rank == root else None

    def scatter_object(self, objs: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of root's list."""
        mine = [pickle.dumps(obj) for obj in objs] if objs is not None and self.rank == root else None
        given = self._meet("scatter", mine).brought[root]
        self._traffic.move(sum(map(len, given)) if self.rank == root else len(given[self.rank]))
        return pickle.loads(given[self.rank])


class _Prepared:
    """A request that is started again and again."""

    def __init__(self, begin: Callable[[], Request]) -> None:
        self._begin = begin
        self._request: Request | None = None

    def start(self) -> None:
        self._request = self._begin()

    def test(self) -> bool:
        return self._request is None or self._request.test()


def _parts(tensor: Tensor, size: int) -> Sequence[Tensor]:
    flat = tensor.detach().view(-1)
    numel = flat.numel() // size
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(size)]


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _fill(out: Tensor, meeting: Meeting) -> None:
    """Put the bytes that all have brought into `out`, side by side."""
    if "joined" not in meeting.made:
        meeting.made["joined"] = b"".join(meeting.all)
    joined = meeting.made["joined"]
    ctypes.memmove(out.data_ptr(), joined, len(joined))


def _combined(brought: Sequence[Tensor], op: str) -> Tensor:
    return combine_in_rank_order(brought, ReduceOp[op])
