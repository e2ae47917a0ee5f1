"""What MPI keeps for the exchange of digests is given back with the group."""

from __future__ import annotations

from mpisgd.transport.internode.digest_exchange import InternodeDigestExchange
from mpisgd.transport.messages.dissemination import Dissemination


class Prepared:
    """A communicator that counts the exchanges that are prepared on it."""

    rank, size, global_ranks = 0, 4, (0, 1, 2, 3)

    def __init__(self) -> None:
        self.open: list[object] = []

    def persistent(self, *about: object) -> list[object]:
        self.open.append(object())
        return self.open[-1:]

    def release(self, requests: list[object]) -> None:
        self.open.remove(requests[0])


def test_a_group_without_shared_memory_gives_its_prepared_messages_back():
    """They kept a communicator and 7 KiB of each group for ever."""
    communicator = Prepared()
    exchange = InternodeDigestExchange(None, Dissemination(communicator), 0)
    assert len(communicator.open) == 2
    exchange.close()
    assert communicator.open == []


def test_who_leaves_the_messages_to_another_rank_sleeps_sooner():
    between = object()
    first_s = InternodeDigestExchange(None, between, 0).yield_s  # type: ignore[arg-type]
    assert InternodeDigestExchange(object(), None, 0).yield_s < first_s  # type: ignore[arg-type]
