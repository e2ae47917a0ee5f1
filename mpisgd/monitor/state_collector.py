"""`StateCollector`: asks all ranks of the job what they do, and answers when they ask.

Between hosts a question goes to a few ranks of each at once, since one of them may be stopped; each gathers
the states of its host's ranks and sends them all. Who does not answer is described from outside.
"""

import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.monitor import process_inspector
from mpisgd.monitor.mailbox_pages import ANSWER_BYTES, Introduction
from mpisgd.monitor.mpi_mailbox import MpiMailbox, Question
from mpisgd.monitor.process_inspector import ProcessIdentity
from mpisgd.monitor.rank_snapshot import take_snapshot
from mpisgd.monitor.rank_state import LEFT, UNRESPONSIVE, RankState, decode, encode
from mpisgd.monitor.shm_mailbox import open_shm_mailbox

if TYPE_CHECKING:
    from mpisgd.core.group import Group
    from mpisgd.core.topology import Topology

__all__ = ["StateCollector"]

ANSWER_S = 2.0  # who lets threads run answers within milliseconds; on an oversubscribed machine later
SURE_S = 0.2  # whom the kernel then says to be stopped or gone will not answer
QUESTIONS_S = 1.0  # how often the monitor's thread receives questions from other hosts
POLL_S = 0.005
ASKED_PER_HOST = 3
# The other host's rank receives the question, waits for its own host's, and sends.
REMOTE_S = QUESTIONS_S + ANSWER_S + 1.5


UNREADABLE = "what it answers cannot be read: another process has written into its memory"


def _decoded(text: bytes) -> list[RankState]:
    """Return the states of a message, none where it is none."""
    try:
        return decode(text)
    except ValueError:
        return []


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
        communicator: GroupCommunicator,
        topology: "Topology",
        groups: Sequence["Group"],
        *,
        threads_allowed: bool,
    ) -> None:
        self.rank = communicator.rank
        self.host = topology.hostnames[topology.node_rank]
        self._groups = groups
        local = communicator.split(topology.node_rank)
        self.shm = open_shm_mailbox(local, topology.nodes[topology.node_rank])
        me = process_inspector.identify_this_process()
        entries = communicator.all_gather_object((self.host, me, self.shm.ranks, secrets.randbits(63)))
        local.free()  # all ranks have opened by now what its first rank has made
        self._hosts: list[str] = [host for host, *_ in entries]
        self.processes: list[ProcessIdentity] = [process for _, process, *_ in entries]
        self.domain = self.shm.ranks
        self.domains: list[tuple[int, ...]] = sorted({domain for _, _, domain, _ in entries})
        size, job = len(entries), entries[0][-1]
        self.shm.introduce(Introduction(self.rank, size, job, me, is_answering=size > 1))
        # The domains that are asked by messages.
        self._others = [each for each in self.domains if each != self.domain and threads_allowed]
        self._communicator = communicator.duplicate()
        self._mpi = MpiMailbox(self._communicator, sum(self._others, ()))
        if not self._others:
            self._mpi.close()
        self._mailboxes = (self.shm, self._mpi)
        self._gathering: list[tuple[Question, Iterator[list[RankState] | None]]] = []
        self._thread: int | None = None  # the one that answers

    # -- asking ----------------------------------------------------------------------------------------

    def snapshot(self, *, stacks: bool = True) -> RankState:
        """Return this rank's own state, with the stacks if wanted."""
        return take_snapshot(self.rank, self.host, self._groups, self.shm.reported(), stacks=stacks)

    def collect(self, *, deep: bool = False) -> list[RankState]:
        """Return the state of every rank of the job, by rank. Not collective; any thread may call it.

        Takes milliseconds where all ranks share a host and answer, about a second with others, and up to
        five where somebody does not answer, who is then described as far as can be seen.

        Args:
            deep: whether to have the stacks of processes that run but do not answer. The signal that this
                takes may disturb what they do.
        """
        asked = [rank for domain in self._others for rank in domain[:ASKED_PER_HOST]]
        deadline_s = time.monotonic() + REMOTE_S
        number = self._mpi.ask(asked, deep=deep)
        try:
            self.shm.wake()  # this rank's own thread receives the answers
            found = self.collect_host(deep=deep) + self._remote_states(number, deadline_s)
        finally:
            self._mpi.forget(number)
        states = {state.rank: state for state in found}
        return [states.get(rank) or self._unreached(rank) for rank in range(len(self.processes))]

    def collect_host(self, *, deep: bool = False) -> list[RankState]:
        """As `collect`, for the ranks that share this one's host only; milliseconds where they answer."""
        query = self._ask_host(deep=deep)
        while (states := next(query)) is None:
            self.sleep(POLL_S)
        return states

    def _ask_host(self, *, deep: bool) -> Iterator[list[RankState] | None]:
        """Ask the other ranks of this host; yield None until they have answered, or have had their time.

        Then yield the states of all, this one's first.
        """
        began_s, missing = time.monotonic(), [rank for rank in self.domain if rank != self.rank]
        number = self.shm.ask(missing)
        states: list[RankState] = []
        while True:
            for rank in list(missing):
                if (text := self.shm.answer_from(rank, number)) is not None:
                    states += _decoded(text) or [self._state_of_silent(rank, UNRESPONSIVE, UNREADABLE)]
                elif self.shm.has_left(rank):
                    states.append(self._state_of_silent(rank, LEFT))
                else:
                    continue
                missing.remove(rank)
            waited_s, silent = time.monotonic() - began_s, [self.processes[rank] for rank in missing]
            will_not_answer = waited_s > SURE_S and all(map(process_inspector.is_stopped_or_gone, silent))
            if not missing or waited_s > ANSWER_S or will_not_answer:
                break
            yield None
        seen = [
            process_inspector.inspect(rank, self.host, self.processes[rank], waited_s, deep=deep)
            for rank in missing
        ]
        yield [self.snapshot(), *states, *seen]

    def _remote_states(self, number: int, deadline_s: float) -> list[RankState]:
        """Return the states of other hosts' ranks, once somebody of each host has sent them."""

        def answers(domain: Sequence[int]) -> list[bytes]:
            texts = [self._mpi.answer_from(rank, number) for rank in domain[:ASKED_PER_HOST]]
            return [text for text in texts if text is not None]

        while not all(map(answers, self._others)) and time.monotonic() < deadline_s:
            self.sleep(POLL_S)
        return [state for domain in self._others for text in answers(domain) for state in _decoded(text)]

    def _unreached(self, rank: int) -> RankState:
        why = "does not answer: it is stopped or gone, or its host cannot be reached"
        if not self._others:
            why = "cannot be asked: MPI runs without thread level MULTIPLE here, and it is on another host"
        return self._state_of_silent(rank, UNRESPONSIVE, why)

    def _state_of_silent(self, rank: int, state: str, note: str = "") -> RankState:
        """Return the state of a rank that has told nothing itself."""
        return RankState(rank, self._hosts[rank], self.processes[rank].pid, state, note=note)

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Let some other ranks know of a deadlock; see `mpisgd.monitor.deadlock_detector`."""
        for mailbox in self._mailboxes:
            mailbox.notify(text, ranks)

    def notices(self) -> list[bytes]:
        """Return the notices that other ranks have sent to this one since the last call."""
        return [text for mailbox in self._mailboxes for text in mailbox.notices()]

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
        for question in self._mpi.questions():
            self._gathering.append((question, self._ask_host(deep=question.deep)))
        for entry in list(self._gathering):
            question, query = entry
            if (states := next(query)) is not None:
                self._gathering.remove(entry)
                self._mpi.answer(question, encode(states))

    def sleep_until_asked(self, asked: int) -> None:
        """Sleep until another rank of this host asks, not at all if one has since `shm.asked()`."""
        self.shm.sleep(asked, POLL_S if self._gathering or self._mpi.is_busy else QUESTIONS_S)

    def close(self) -> None:
        """Neither ask nor answer any more. Not collective."""
        for mailbox in self._mailboxes:
            mailbox.close()

    def free(self) -> None:
        """Give the communicator back. Collective."""
        self._communicator.free()
