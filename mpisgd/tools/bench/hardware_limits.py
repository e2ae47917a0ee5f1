"""What bounds a collective: copying its bytes on one host, between hosts the link and a ping-pong over it."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
from mpisgd.job.rank_info import topology
from mpisgd.tools.bench.cases import Case, link_bytes
from mpisgd.tools.bench.measure import OnDevice, Timed, Variant
from mpisgd.tools.bench.report.rows import LIMIT, PING_PONG

if TYPE_CHECKING:
    from mpisgd.tools.bench.network import Ring
    from mpisgd.transport.mpi import Communicator

__all__ = ["bounds", "keep_faster_limit", "limits"]

# Beyond this the link's rate counts, not how long the way is.
MAX_PING_BYTES = 64 * 2**10
NAP_S = 0.001
# What crosses the links, in two ways: the faster one is the limit.
OVER_MPI, OVER_TCP = "limit, MPI", "limit, TCP"

Call = Callable[[], Any]


def bounds(case: Case, communicator: "Communicator", ring: "Ring | None") -> list[Variant]:
    """Return the limit, and for few bytes between hosts a ping-pong."""
    found = limits(case, communicator, ring)
    if mpisgd.num_nodes() > 1 and case.nbytes <= MAX_PING_BYTES:
        found.append(OverLink(PING_PONG, _ping_pong(case.nbytes, communicator), communicator))
    return found


def limits(case: Case, communicator: "Communicator", ring: "Ring | None") -> list[Variant]:
    """Return the limits of a case: copying its bytes, or passing them over the link.

    Collective. `keep_faster_limit` makes one of them out of several.
    """
    here = topology()
    if here.num_nodes == 1:
        source = torch.ones(case.nbytes, dtype=torch.uint8, device=case.device)
        target = torch.zeros_like(source)
        return [Timed(LIMIT, lambda: target.copy_(source), OnDevice(case.device))]  # all ranks copy at once
    calls: dict[str, Call] = {}
    if here.local_rank == 0:
        calls = _leader_calls(max(1, round(link_bytes(case, here.ranks_per_host))), communicator, ring)
    return [OverLink(name, calls.get(name), communicator) for name in mpisgd.broadcast_object(list(calls))]


def keep_faster_limit(seconds: dict[str, list[float]]) -> None:
    """Keep the faster of the ways over the link, as the limit."""
    ways = [seconds.pop(name) for name in (OVER_MPI, OVER_TCP) if name in seconds]
    if ways:
        seconds[LIMIT] = min(ways, key=statistics.median)


# -- between hosts: some ranks send, the others sleep ---------------------------------------------------


class OverLink(Timed):
    """A variant in which some ranks have a part; the others sleep meanwhile, and leave their cores to those.

    Args:
        name: in tables.
        call: what this rank does, None where it has no part.
        communicator: to send over.
    """

    def __init__(self, name: str, call: Call | None, communicator: "Communicator") -> None:
        super().__init__(name, call or (lambda: None))
        self._comm = communicator.comm

    def time(self, calls: int) -> float:
        """See `Variant`; what others take does not count here."""
        seconds = super().time(calls)
        all_are_done = self._comm.Ibarrier()
        while not all_are_done.Test():
            time.sleep(NAP_S)
        return seconds


def _leader_calls(nbytes: int, communicator: "Communicator", ring: "Ring | None") -> dict[str, Call]:
    """Return a function that sends the bytes which must leave a host to the next one, while as many come in.

    By MPI, and by a ring of TCP connections where the hosts' leaders have one: all of them do, or none.
    """
    here = topology()
    after, before = (here.nodes[(here.node_rank + way) % here.num_nodes][0] for way in (1, -1))
    give, take = memoryview(_bytes(nbytes)), memoryview(_bytes(nbytes))
    comm = communicator.comm
    calls: dict[str, Call] = {OVER_MPI: lambda: comm.Sendrecv(give, after, recvbuf=take, source=before)}
    if ring is not None:
        calls[OVER_TCP] = functools.partial(ring, give, take)
    return calls


def _ping_pong(nbytes: int, communicator: "Communicator") -> Call | None:
    """Return a message from the first host to the second, and one back; None in other ranks."""
    pair, rank = [ranks[0] for ranks in topology().nodes[:2]], mpisgd.rank()
    if rank not in pair:
        return None
    serves = rank == pair[0]
    ball, other, comm = _bytes(nbytes), pair[serves], communicator.comm
    first, second = (comm.Send, comm.Recv) if serves else (comm.Recv, comm.Send)

    def play() -> None:
        first(ball, other)
        second(ball, other)

    return play


def _bytes(nbytes: int) -> bytearray:
    """Return memory that MPI takes as bytes, touched, so that its pages are there."""
    return bytearray(b"\1") * nbytes
