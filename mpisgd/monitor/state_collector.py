"""`StateCollector`: asks all ranks of the job what they do, and answers when they ask.

Between hosts a question goes to a few ranks of each at once, since one of them may be stopped; each gathers
the states of its host's ranks and sends them all. Who does not answer is described from outside.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from mpisgd.monitor.mpi_mailbox import MpiMailbox, Question
from mpisgd.monitor.process_inspector import (
    ProcessIdentity,
    identify_this_process,
    inspect,
    is_stopped_or_gone,
)
from mpisgd.monitor.rank_snapshot import take_snapshot
from mpisgd.monitor.rank_state import LEFT, UNRESPONSIVE, RankState, decode, encode
from mpisgd.monitor.shm_mailbox import ANSWER_BYTES, ShmMailbox, open_shm_mailbox, private_mailbox

if TYPE_CHECKING:
    from mpisgd.core.group import Group
    from mpisgd.core.topology import Topology
    from mpisgd.transport.mpi import Communicator

__all__ = ["StateCollector"]

ANSWER_S = 2.0  # who lets threads run answers within milliseconds; on an oversubscribed machine later
SURE_S = 0.2  # whom the kernel then says to be stopped or gone will not answer
QUESTIONS_S = 1.0  # how often the monitor's thread receives questions from other hosts
POLL_S = 0.005
ASKED_PER_HOST = 3
# The other host's rank receives the question, waits for its own host's, and sends.
REMOTE_S = QUESTIONS_S + ANSWER_S + 1.5


class HostQuery:
    """A question to the other ranks of this host, and the states that have come in."""

    def __init__(self, collector: "StateCollector", *, deep: bool) -> None:
        self.began_s = time.monotonic()
        self._collector = collector
        self._deep = deep
        self._missing = [rank for rank in collector.domain if rank != collector.rank]
        self._number = collector.shm.ask(self._missing)
        self._states: list[RankState] = []

    def is_over(self) -> bool:
        """Take in what has come; return whether all have answered, or have had their time."""
        self._missing = [rank for rank in self._missing if not self._has_come(rank)]
        waited_s = time.monotonic() - self.began_s
        if waited_s > SURE_S:
            return waited_s > ANSWER_S or all(map(self._will_not_answer, self._missing))
        return not self._missing

    def _has_come(self, rank: int) -> bool:
        shm = self._collector.shm
        if (text := shm.answer_from(rank, self._number)) is not None:
            self._states += decode(text)
            return True
        if shm.has_left(rank):
            pid = self._collector.processes[rank].pid
            self._states.append(RankState(rank, self._collector.host, pid, LEFT))
            return True
        return False

    def _will_not_answer(self, rank: int) -> bool:
        return is_stopped_or_gone(self._collector.processes[rank])

    def states(self) -> list[RankState]:
        """Return the states of all ranks of the host, this one's first; once the query is over."""
        waited_s, host = time.monotonic() - self.began_s, self._collector.host
        silent = [
            inspect(rank, host, self._collector.processes[rank], waited_s, deep=self._deep)
            for rank in self._missing
        ]
        return [self._collector.snapshot(), *self._states, *silent]


class StateCollector:
    """The questions and answers of one rank. Making one is collective over the job.

    Args:
        communicator: of the job's world.
        topology: of the job.
        groups: of the job; other threads may add and remove some.
        threads_allowed: whether a thread may call MPI; without, other hosts cannot be asked.

    Attributes:
        rank: this rank.
        host: name of its host.
        domains: the job's ranks, those together that share a mailbox in memory; as a rule a host's.
        domain: the one of this rank.
        processes: by global rank, its process.
        shm: the mailbox of the domain.
    """

    def __init__(
        self,
        communicator: "Communicator",
        topology: "Topology",
        groups: Sequence["Group"],
        *,
        threads_allowed: bool,
    ) -> None:
        self.rank = communicator.rank
        self.host = topology.hostnames[topology.node_rank]
        self._groups = groups
        local = communicator.split(topology.node_rank)
        shm = open_shm_mailbox(local, topology.nodes[topology.node_rank])
        entries = communicator.all_gather_object((identify_this_process(), self.host, shm is not None))
        local.free()  # all ranks have opened by now what its first rank has made
        self.processes: list[ProcessIdentity] = [process for process, _, _ in entries]
        self._hosts = [host for _, host, _ in entries]
        self.domains = [
            domain
            for ranks in topology.nodes
            for domain in ([ranks] if entries[ranks[0]][2] else [(rank,) for rank in ranks])
        ]
        self.domain = next(domain for domain in self.domains if self.rank in domain)
        self._others = [domain for domain in self.domains if domain is not self.domain]
        self.shm: ShmMailbox = shm or private_mailbox(self.rank)
        self._communicator = communicator.duplicate() if self._others else None
        self._mpi: MpiMailbox | None = None
        if self._communicator is not None and threads_allowed:
            self._mpi = MpiMailbox(self._communicator, sum(self._others, ()))
        self._mailboxes: list[ShmMailbox | MpiMailbox] = [
            self.shm,
            *([] if self._mpi is None else [self._mpi]),
        ]
        self._gathering: list[tuple[MpiMailbox, Question, HostQuery]] = []
        self._thread: int | None = None  # the one that answers

    # -- asking ----------------------------------------------------------------------------------------

    def snapshot(self, *, stacks: bool = True) -> RankState:
        """Return this rank's own state, with the stacks if wanted."""
        return take_snapshot(self.rank, self.host, self._groups, self.shm.reported(), stacks=stacks)

    def collect(self, *, deep: bool = False) -> list[RankState]:
        """Return what every rank of the job does, by rank. Not collective; any thread may call it.

        Takes milliseconds where all ranks share a host and answer, about a second with others, and up to
        five where somebody does not answer, who is then described as far as can be seen.

        Args:
            deep: whether to have the stacks of processes that run but do not answer. The signal that this
                takes may disturb what they do.
        """
        asked = [rank for domain in self._others for rank in domain[:ASKED_PER_HOST]]
        number = 0 if self._mpi is None else self._mpi.ask(asked, deep=deep)
        try:
            self.shm.wake()  # this rank's own thread receives the answers
            query = HostQuery(self, deep=deep)
            self._wait_for(query.is_over, ANSWER_S + POLL_S)
            states = {state.rank: state for state in query.states()}
            if self._mpi is not None:
                states |= self._remote_states(self._mpi, number, query.began_s + REMOTE_S)
        finally:
            if self._mpi is not None:
                self._mpi.forget(number)
        return [states.get(rank) or self._unreached(rank) for rank in range(len(self.processes))]

    def collect_host(self) -> list[RankState]:
        """As `collect`, for the ranks that share this one's host only; milliseconds where they answer."""
        query = HostQuery(self, deep=False)
        self._wait_for(query.is_over, ANSWER_S + POLL_S)
        return query.states()

    def _remote_states(self, mpi: MpiMailbox, number: int, deadline_s: float) -> dict[int, RankState]:
        """Return the states of other hosts' ranks, once somebody of each host has sent them."""

        def answers(domain: Sequence[int]) -> list[bytes]:
            texts = [mpi.answer_from(rank, number) for rank in domain[:ASKED_PER_HOST]]
            return [text for text in texts if text is not None]

        self._wait_for(lambda: all(map(answers, self._others)), deadline_s - time.monotonic())
        found = [state for domain in self._others for text in answers(domain) for state in decode(text)]
        return {state.rank: state for state in found}

    def _unreached(self, rank: int) -> RankState:
        why = "does not answer: it is stopped or gone, or its host cannot be reached"
        if self._mpi is None:
            why = "cannot be asked: MPI runs without thread level MULTIPLE here, and it is on another host"
        return RankState(rank, self._hosts[rank], self.processes[rank].pid, UNRESPONSIVE, note=why)

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Let some other ranks know of a deadlock; see `mpisgd.monitor.deadlock_detector`."""
        for mailbox in self._mailboxes:
            mailbox.notify(text, ranks)

    def notices(self) -> list[bytes]:
        """Return what other ranks have let this one know since this was last called."""
        return [text for mailbox in self._mailboxes for text in mailbox.notices()]

    def _wait_for(self, ready: Callable[[], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not ready() and time.monotonic() < deadline_s:
            self.sleep(POLL_S)

    def sleep(self, seconds: float) -> None:
        """Sleep; on the thread that answers, whom others may be asking meanwhile, answer first."""
        if threading.get_ident() == self._thread:
            self.answer()
        time.sleep(seconds)

    # -- answering -------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Answer what this rank was asked, here and from other hosts; on one thread only."""
        self._thread = threading.get_ident()
        for stamp in self.shm.questions():
            self.shm.answer(stamp, encode([self.snapshot()], ANSWER_BYTES))
        if self._mpi is not None:
            for question in self._mpi.questions():
                self._gathering.append((self._mpi, question, HostQuery(self, deep=question.deep)))
        for entry in list(self._gathering):
            mailbox, question, query = entry
            if query.is_over():
                self._gathering.remove(entry)
                mailbox.answer(question, encode(query.states()))

    def sleep_until_asked(self, asked: int) -> None:
        """Sleep until another rank of this host asks, not at all if one has since `shm.asked()`."""
        busy = self._mpi is not None and (self._gathering or self._mpi.is_busy)
        self.shm.sleep(asked, POLL_S if busy else QUESTIONS_S)

    def close(self) -> None:
        """Neither ask nor answer any more. Not collective."""
        for mailbox in self._mailboxes:
            mailbox.close()

    def free(self) -> None:
        """Give the communicator back. Collective."""
        if self._communicator is not None:
            self._communicator.free()
