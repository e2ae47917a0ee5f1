"""`Network`: the messages between ranks that are threads of one process, their meetings and their losses.

A message takes a time that the seed draws. Those of one rank to another arrive in the order in which they
were sent, as MPI says; those of different ranks overtake each other. A message is copied when it is sent, or
only when it is received: both are allowed to MPI, and a program may rely on neither.

A lost rank stops where it is. What it has sent and has arrived stays; of what was under way the seed draws
how much arrives. The others notice it one after the other.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from mpisgd.errors import CollectiveTimeout, PeerLost
from mpisgd.transport.loopback.faults import Loss
from mpisgd.transport.loopback.links import Links
from mpisgd.transport.loopback.mailbox import Mailbox, Message, MessageMemory, Request
from mpisgd.transport.loopback.meeting import Agreement, Meeting
from mpisgd.transport.loopback.scheduler import SeededScheduler
from mpisgd.transport.loopback.traffic import Traffic

__all__ = ["Context", "Network"]

LONGEST_WAY_S = 0.001
LONGEST_NOTICE_S = 0.1  # until a rank notices a loss, or that a communicator was revoked
IMMEDIATE_SHARE = 0.5  # of the messages that are copied at once
ARRIVING_SHARE = 0.5  # of what is under way from a rank that is lost; nothing after what does not arrive


class _Flight:
    """A message under way."""

    def __init__(self, context: "Context", dst: int, message: Message) -> None:
        self.context = context
        self.dst = dst
        self.message = message
        self.is_dropped = False


class Context:
    """What the ranks of one communicator share.

    Args:
        network: of the run.
        ranks: of the job at its start, which are its ranks, in their order.
        names: what messages call them: ranks of the job; None: the same.

    Attributes:
        ranks: as given.
        names: as given.
        revoked: which of its ranks know that it was revoked.
        is_revoked: whether it was.
    """

    def __init__(self, network: "Network", ranks: Sequence[int], names: Sequence[int] | None = None) -> None:
        self.network = network
        self.ranks = tuple(ranks)
        self.names = self.ranks if names is None else tuple(names)
        self.revoked: set[int] = set()
        self.is_revoked = False
        self._everybody = range(len(self.ranks))
        self._meetings: list[Meeting] = []
        self._apart: dict[Any, Meeting] = {}
        self._agreements: list[Agreement] = []
        self._boxes: defaultdict[int, Mailbox] = defaultdict(lambda: Mailbox(self._is_readable))
        self._latest: dict[tuple[int, int], float] = {}

    # -- meetings ---------------------------------------------------------------------------------------

    def meeting(self, number: int, kind: str) -> Meeting:
        """Return the meeting of this number, which the first that asks makes."""
        if number == len(self._meetings):
            self._meetings.append(Meeting(kind, len(self.ranks)))
        return self._meetings[number]

    def meeting_apart(self, key: Any, kind: str, size: int) -> Meeting:
        """Return a meeting of some of the ranks, which the first that asks makes."""
        if key not in self._apart:
            self._apart[key] = Meeting(kind, size)
        return self._apart[key]

    def agreement(self, number: int, kind: str) -> Agreement:
        """Return the agreement of this number, which the first that asks makes."""
        if number == len(self._agreements):
            self._agreements.append(Agreement(kind, self.ranks))
        return self._agreements[number]

    def has_come(self, meeting: Meeting, members: Iterable[int]) -> None:
        """Note that somebody has come to a meeting of these ranks."""
        if meeting.is_complete():
            for member in members:
                self.network.scheduler.concern(self.ranks[member])

    # -- messages ---------------------------------------------------------------------------------------

    def send(self, src: int, dst: int, tag: int, memory: MessageMemory) -> Request:
        """Start sending; the request is over when the memory may be changed."""
        network = self.network
        network.count(self.ranks[src])
        network.traffic[self.ranks[src]].send(self.ranks[dst], memory.nbytes)
        draws = network.scheduler.draws

        def is_over() -> bool:
            return request.is_done or self._goes_on(src, (dst,))

        request = Request(is_over)
        if draws.chance(IMMEDIATE_SHARE):
            memory, request.is_done = memory.copy(), True
        arrives_s = network.arrives_s(self.ranks[src], self.ranks[dst], memory.nbytes)
        arrives_s = max(arrives_s, self._latest.get((src, dst), 0.0))
        self._latest[src, dst] = arrives_s
        network.send_off(_Flight(self, dst, Message(src, tag, memory, request)), arrives_s)
        return request

    def arrive(self, dst: int, message: Message) -> None:
        """Let a message arrive."""
        self._boxes[dst].arrive(message)
        self.network.has_arrived(self, self.ranks[dst], dst)

    def receive(self, dst: int, src: int | None, tag: int, memory: MessageMemory) -> Request:
        """Start receiving; `src` None: from whoever sends first."""

        def is_over() -> bool:
            self.match(dst)
            return request.is_done or self._goes_on(dst, self._everybody if src is None else (src,))

        request = Request(is_over)
        self.match(dst)
        if (message := self._boxes[dst].post(src, tag, memory, request)) is not None:
            self._was_received(message)
        return request

    def cancel(self, dst: int, request: Request) -> None:
        """Receive nothing by this request any more."""
        self.match(dst)
        self._boxes[dst].cancel(request)
        request.is_done = True

    def waiting(self, dst: int, tag: int | None) -> Message | None:
        """Return a message that has arrived and that nobody receives."""
        self.match(dst)
        return self._boxes[dst].first_unexpected(tag)

    def match(self, dst: int) -> None:
        """Give what has arrived to the receives that wait for it, the first to the first."""
        for message in self._boxes[dst].match():
            self._was_received(message)

    def _was_received(self, message: Message) -> None:
        self.network.scheduler.concern(self.ranks[message.src])

    def _is_readable(self, message: Message) -> bool:
        return message.request.is_done or self.ranks[message.src] not in self.network.lost

    # -- losses -----------------------------------------------------------------------------------------

    def check(self, me: int, others: Iterable[int] | None = None) -> None:
        """Raise where this rank knows that it waits in vain.

        Args:
            me: group rank.
            others: of whom; None: of all.

        Raises:
            PeerLost: one of them is lost, or the communicator was revoked.
        """
        if not self.network.lost:
            return
        known = self.network.known[self.ranks[me]]
        for other in self._everybody if others is None else others:
            if self.ranks[other] in known:
                raise PeerLost(f"loopback: rank {self.names[other]} of the job was lost")
        if me in self.revoked:
            raise PeerLost("loopback: the communicator was revoked, since a rank of the job was lost")

    def _goes_on(self, me: int, others: Iterable[int]) -> bool:
        """Return False; raises as `check`."""
        self.check(me, others)
        return False


class Network:
    """What all ranks of a run share.

    Args:
        scheduler: decides who runs, and draws.
        hosts: of each rank, the number of its host.
        timeout_s: how long a rank waits in what MPI would block in.
        losses: of ranks.
        links: between the hosts; None: messages take times that the seed draws.

    Attributes:
        scheduler, hosts: as given.
        world: of all ranks.
        lost: the ranks that were lost.
        known: which of these each rank knows of.
        news: how often each rank has noticed something.
        communicators: those that the revocation of all of a rank concerns; see `revoke_all`.
        traffic: of each rank, what it has sent and MPI's collectives have moved.
    """

    def __init__(
        self,
        scheduler: SeededScheduler,
        hosts: Sequence[int],
        timeout_s: float,
        losses: Sequence[Loss] = (),
        links: Links | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._links = links
        self.hosts = tuple(hosts)
        self.lost: set[int] = set()
        self.known: defaultdict[int, set[int]] = defaultdict(set)
        self.news: Counter[int] = Counter()
        self.traffic = [Traffic() for _ in hosts]
        # Not weak: what a reference cycle keeps lives until garbage is collected, which no seed decides.
        self.communicators: defaultdict[int, dict[Any, None]] = defaultdict(dict)
        self.world = Context(self, range(len(hosts)))
        self._timeout_s = timeout_s
        self._unmatched: defaultdict[int, dict[Context, int]] = defaultdict(dict)
        self._flights: defaultdict[int, dict[int, _Flight]] = defaultdict(dict)  # by their senders
        self._numbers = itertools.count()
        self._losses: defaultdict[tuple[int, int], list[Sequence[int]]] = defaultdict(list)
        self._counts: Counter[int] = Counter()
        for loss in losses:
            for rank in loss.ranks:
                self.lose_later(loss.ranks, rank, loss.at)

    def progress(self, rank: int) -> None:
        """Receive what has arrived for a rank of the job, on any communicator; MPI does so in any call."""
        unmatched = self._unmatched[rank]
        while unmatched:
            context, me = unmatched.popitem()
            context.match(me)

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait as a blocking call of MPI does, which has no limit; here it has one.

        Raises:
            CollectiveTimeout: the others did not come.
        """
        if not ready() and not self.scheduler.wait(ready, self._timeout_s):
            raise CollectiveTimeout(f"loopback: {what()} was not over after {self._timeout_s:g} s")

    # -- messages ---------------------------------------------------------------------------------------

    def arrives_s(self, rank: int, to: int, nbytes: int) -> float:
        """Return when a message arrives that is sent now; of those between the same two the last counts."""
        now_s = self.scheduler.now_s()
        if self._links is not None:
            return self._links.arrives_s(now_s, rank, self.hosts[rank], self.hosts[to], nbytes)
        return now_s + self.scheduler.draws.fraction() * LONGEST_WAY_S

    def send_off(self, flight: _Flight, arrives_s: float) -> None:
        """Let a message arrive at that time."""
        under_way = self._flights[flight.context.ranks[flight.message.src]]
        number = next(self._numbers)
        under_way[number] = flight

        def arrive() -> None:
            del under_way[number]
            if not flight.is_dropped:
                flight.context.arrive(flight.dst, flight.message)

        self.scheduler.at(arrives_s, arrive)

    def has_arrived(self, context: Context, rank: int, me: int) -> None:
        """Note that a message for a rank of the job has come; `me`: it in that communicator."""
        self._unmatched[rank][context] = me
        self.scheduler.concern(rank)

    # -- losses -----------------------------------------------------------------------------------------

    def lose_later(self, ranks: Sequence[int], rank: int, waits: int) -> None:
        """Lose ranks, all at once, when one rank has come to so many further waits and messages."""
        self._losses[rank, self._counts[rank] + waits].append(ranks)
        self.scheduler.at_wait = self.count

    def count(self, rank: int) -> None:
        """Count a wait or a message of a rank; it may be its last one."""
        self._counts[rank] += 1
        for ranks in self._losses.get((rank, self._counts[rank]), ()):
            self.scheduler.soon(functools.partial(self.lose, ranks))

    def lose(self, ranks: Collection[int]) -> None:
        """Lose ranks, all at once. Does not return to one of these."""
        now_s, draws = self.scheduler.now_s(), self.scheduler.draws
        new = [rank for rank in ranks if rank not in self.lost]
        self.lost.update(new)
        for rank in new:
            self._drop_flights(rank)
        for rank in range(len(self.hosts)):
            if rank not in self.lost:
                self.scheduler.at(
                    now_s + draws.fraction() * LONGEST_NOTICE_S, functools.partial(self._notice, rank, new)
                )
        self.scheduler.lose(new)

    def _drop_flights(self, rank: int) -> None:
        """Draw what of a lost rank's messages under way still arrives: of each pair the first ones."""
        cut = set()
        for flight in self._flights[rank].values():
            pair = flight.context, flight.dst
            is_copied = flight.message.request.is_done
            if pair in cut or not is_copied or not self.scheduler.draws.chance(ARRIVING_SHARE):
                cut.add(pair)
                flight.is_dropped = True

    def _notice(self, rank: int, lost: Sequence[int]) -> None:
        self.known[rank].update(lost)
        self.has_news(rank)

    def has_news(self, rank: int) -> None:
        """Note that a rank has noticed something."""
        self.news[rank] += 1
        self.scheduler.concern(rank)

    def agree(self, context: Context, agreement: Agreement, me: int) -> None:
        """Wait until all ranks that are left have come to an agreement; then this one knows who they are."""
        for rank in context.ranks:
            self.scheduler.concern(rank)
        self.wait(
            lambda: agreement.is_settled(self.lost), lambda: f"{agreement.kind} of the ranks {context.ranks}"
        )
        self.known[me].update(rank for place, rank in enumerate(context.ranks) if place not in agreement.left)

    def revoke_all(self, rank: int) -> None:
        """Revoke all communicators of a rank."""
        self.revoke([communicator.context for communicator in self.communicators[rank]], rank)

    def revoke(self, contexts: Sequence[Context], by: int) -> None:
        """Revoke communicators; each other rank of theirs notices it after a while, of all at once."""
        new = [context for context in contexts if not context.is_revoked]
        for context in new:
            context.is_revoked = True
        now_s, draws = self.scheduler.now_s(), self.scheduler.draws
        for rank in sorted({rank for context in new for rank in context.ranks} - self.lost):
            if rank == by:
                self._revoked(rank, new)
            else:
                at_s = now_s + draws.fraction() * LONGEST_NOTICE_S
                self.scheduler.at(at_s, functools.partial(self._revoked, rank, new))

    def _revoked(self, rank: int, contexts: Sequence[Context]) -> None:
        for context in contexts:
            if rank in context.ranks:
                context.revoked.add(context.ranks.index(rank))
        self.has_news(rank)
