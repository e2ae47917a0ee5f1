"""What bounds a collective: copying its bytes on one host, between hosts the link and a ping-pong over it."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
from mpisgd.bench.cases import Case, link_bytes
from mpisgd.bench.measure import Timed, Variant
from mpisgd.bench.report.rows import LIMIT, PING_PONG
from mpisgd.job.rank_info import topology

if TYPE_CHECKING:
    from mpisgd.bench.network import Ring
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
        found.append(_ping_pong(case.nbytes, communicator))
    return found


def limits(case: Case, communicator: "Communicator", ring: "Ring | None") -> list[Variant]:
    """Return what no algorithm can beat: copying, or passing over the link, the bytes of a case.

    Collective. `keep_faster_limit` makes one of them out of several.
    """
    if mpisgd.num_nodes() == 1:
        return [Timed(LIMIT, _memcpy(case))]
    nbytes = max(1, round(link_bytes(case, [len(ranks) for ranks in topology().nodes])))
    over_tcp = [_over_tcp(nbytes, communicator, ring)] if _all_leaders_have(ring) else []
    return [_over_mpi(nbytes, communicator), *over_tcp]


def keep_faster_limit(seconds: dict[str, list[float]]) -> None:
    """Keep the faster of the ways over the link, as the limit."""
    ways = [seconds.pop(name) for name in (OVER_MPI, OVER_TCP) if name in seconds]
    if ways:
        seconds[LIMIT] = min(ways, key=statistics.median)


def _all_leaders_have(ring: "Ring | None") -> bool:
    has: list[bool] = [False] * mpisgd.size()
    mpisgd.all_gather_object(has, ring is not None)
    return all(has[ranks[0]] for ranks in topology().nodes)


def _memcpy(case: Case) -> Call:
    """Return a copy of the case's bytes; all ranks copy at once."""
    source = torch.ones(case.nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


# -- between hosts: some ranks send, the others sleep ---------------------------------------------------


class OverLink(Timed):
    """A variant in which some ranks have a part; the others sleep meanwhile, and leave their cores to those.

    Args:
        name: in tables.
        senders: the ranks that have a part.
        call: returns what the sender with this place does.
        communicator: to send over.
    """

    def __init__(
        self, name: str, senders: Sequence[int], call: Callable[[int], Call], communicator: "Communicator"
    ) -> None:
        rank = mpisgd.rank()
        super().__init__(name, call(senders.index(rank)) if rank in senders else lambda: None)
        self._comm = communicator.comm

    def time(self, calls: int) -> float:
        """See `Variant`; what others take does not count here."""
        seconds = super().time(calls)
        all_are_done = self._comm.Ibarrier()
        while not all_are_done.Test():
            time.sleep(NAP_S)
        return seconds


def _over_mpi(nbytes: int, communicator: "Communicator") -> Variant:
    """Return what sends the bytes that must leave a host to the next one, while as many come in."""
    leaders = [ranks[0] for ranks in topology().nodes]

    def call(place: int) -> Call:
        give, take = _bytes(nbytes), _bytes(nbytes)
        after, before = leaders[(place + 1) % len(leaders)], leaders[place - 1]
        return lambda: communicator.comm.Sendrecv(give, after, recvbuf=take, source=before)

    return OverLink(OVER_MPI, leaders, call, communicator)


def _over_tcp(nbytes: int, communicator: "Communicator", ring: "Ring | None") -> Variant:
    """Return the same without MPI."""

    def call(_: int) -> Call:
        assert ring is not None
        give, take = memoryview(_bytes(nbytes)), memoryview(_bytes(nbytes))
        return lambda: ring.pass_on(give, take)

    return OverLink(OVER_TCP, [ranks[0] for ranks in topology().nodes], call, communicator)


def _ping_pong(nbytes: int, communicator: "Communicator") -> Variant:
    """Return a message from the first host to the second, and one back."""
    pair = [ranks[0] for ranks in topology().nodes[:2]]

    def call(place: int) -> Call:
        ball, other = _bytes(nbytes), pair[1 - place]

        def serve() -> None:
            communicator.comm.Send(ball, other)
            communicator.comm.Recv(ball, other)

        def answer() -> None:
            communicator.comm.Recv(ball, other)
            communicator.comm.Send(ball, other)

        return answer if place else serve

    return OverLink(PING_PONG, pair, call, communicator)


def _bytes(nbytes: int) -> bytearray:
    """Return memory that MPI takes as bytes, touched, so that its pages are there."""
    return bytearray(b"\1") * nbytes
