"""`StallMonitor`: the thread of each process that answers what it does, and the asking of all others."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mpisgd.core import wait_registry
from mpisgd.monitor.deadlock_detector import DeadlockDetector
from mpisgd.monitor.mpi_mailbox import ASKED_PER_HOST, MpiMailbox, Question
from mpisgd.monitor.process_inspector import ProcessIdentity, describe, is_stopped_or_gone, take_seat
from mpisgd.monitor.rank_snapshot import WATCH_THREAD, group_key, look
from mpisgd.monitor.rank_state import LEFT, SILENT, RankState, decode, encode
from mpisgd.monitor.reporter import Reporter
from mpisgd.monitor.shm_mailbox import ANSWER_BYTES, ShmMailbox, open_board, private_board
from mpisgd.monitor.watchdog import Watchdog
from mpisgd.transport.ipc.memfd import open_shared

if TYPE_CHECKING:
    from mpisgd.core.group import Group
    from mpisgd.core.topology import Topology
    from mpisgd.transport.mpi import Communicator

__all__ = ["StallMonitor"]

ANSWER_S = 2.0  # who lets threads run answers within milliseconds; on a crowded machine later
SURE_S = 0.2  # whom the kernel then says to be stopped or gone will not answer
LOOK_S = 1.0  # how often the thread looks for questions from other hosts
POLL_S = 0.005
# The other host's rank looks for the question, waits for its own host's, and sends.
REMOTE_S = LOOK_S + ANSWER_S + 1.5


class Gathering:
    """The views of the ranks of a host, while they come in."""

    def __init__(self, watch: "StallMonitor", *, deep: bool) -> None:
        ranks = [rank for rank in watch.unit if rank != watch.rank]
        self._watch = watch
        self._deep = deep
        self._began_s = time.monotonic()
        self._missing = {rank: watch.place[rank] for rank in ranks}
        self._stamp = watch.board.ask(list(self._missing.values()))
        self.views: dict[int, RankState] = {}

    def is_over(self) -> bool:
        """Take in what has come; return whether all have answered, or have had their time."""
        board = self._watch.board
        for rank, place in list(self._missing.items()):
            if (text := board.answer_of(place, self._stamp)) is not None:
                self._take(rank, decode(text))
            elif board.has_left(place):
                self._take(rank, RankState(rank, self._watch.host, self._watch.seats[rank].pid, LEFT))
        waited_s = time.monotonic() - self._began_s
        if waited_s > SURE_S and all(is_stopped_or_gone(self._watch.seats[rank]) for rank in self._missing):
            return True
        return waited_s > ANSWER_S

    def _take(self, rank: int, view: RankState) -> None:
        self.views[rank] = view
        del self._missing[rank]

    def finish(self) -> list[RankState]:
        """Describe those that have not answered, and return all views."""
        waited_s = time.monotonic() - self._began_s
        for rank in self._missing:
            seen = describe(rank, self._watch.host, self._watch.seats[rank], waited_s, deep=self._deep)
            self.views[rank] = seen
        return list(self.views.values())


class StallMonitor:
    """The diagnosis of one rank's job. Making one is collective over the job.

    Args:
        wire: of the job's world.
        topology: of the job.
        groups: tells the groups of which this rank is a member.
        threads_allowed: whether the thread may speak with MPI; without, other hosts cannot be asked.
        limit_s: the job's time limit.
        warning_s: after how long a wait is worth a warning; 0: never.
        say: takes what the user should know.

    Attributes:
        stalls: what is done about this rank's own long waits.
        place: of the global ranks that share this rank's board, where on it.
        seats: by global rank, its process.
    """

    def __init__(
        self,
        wire: "Communicator",
        topology: "Topology",
        groups: Callable[[], Sequence["Group"]],
        *,
        threads_allowed: bool,
        limit_s: float,
        warning_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.rank = wire.rank
        self.size = wire.size
        self.host = topology.hostnames[topology.node_rank]
        self._groups = groups
        local = wire.split(topology.node_rank)
        board = open_board(local) if local.size > 1 else None
        self._voice = Reporter(self, open_shared(local, 0) if board is not None else -1, say)
        entries = wire.all_gather_object((take_seat(), self.host, board is not None))
        self.seats: list[ProcessIdentity] = [seat for seat, _, _ in entries]
        local.free()  # all ranks have opened by now what its first rank has made
        self.hosts = [host for _, host, _ in entries]
        shares = [shared for _, _, shared in entries]
        # Ranks that share a board; a rank without one stands for itself.
        self.units = [
            unit
            for ranks in topology.nodes
            for unit in ([ranks] if shares[ranks[0]] else [(rank,) for rank in ranks])
        ]
        self.unit = next(unit for unit in self.units if self.rank in unit)
        self.place = {rank: i for i, rank in enumerate(self.unit)}
        self.board: ShmMailbox = board or private_board()
        self._wire = wire.duplicate() if len(self.units) > 1 else None
        self._post = MpiMailbox(self._wire) if self._wire is not None and threads_allowed else None
        self.stalls = Watchdog(self, self._voice, limit_s=limit_s, warning_s=warning_s)
        self._served: list[tuple[Question, Gathering]] = []
        self._num_asking = 0
        self._answered = 0  # the stamp of the last question that was
        self._judge = DeadlockDetector(self)
        self._lock = threading.Lock()
        self._over = False
        self._thread: threading.Thread | None = None
        if self.size > 1:
            self._thread = threading.Thread(target=self._serve, name=WATCH_THREAD, daemon=True)
            self._thread.start()
            wait_registry.at_limit = self.stalls.at_limit

    # -- asking ----------------------------------------------------------------------------------------

    def look(self, *, stacks: bool = True) -> RankState:
        """Return this rank's own view, with the stacks if wanted."""
        return look(self.rank, self.host, self._groups(), self.board.told(), stacks=stacks)

    def ask(self, *, deep: bool = False) -> list[RankState]:
        """Return what every rank of the job does, by rank. Not collective; any thread may call it.

        Takes milliseconds where all ranks share a host and answer, about a second with others, and up to
        five where somebody does not answer, who is then described as far as can be seen.

        Args:
            deep: whether to have the stacks of processes that run but do not answer. The signal that this
                takes may disturb what they do.
        """
        views = {self.rank: self.look()}
        far = [unit for unit in self.units if unit is not self.unit]
        with self._asking():
            number = self._post.ask(far, deep=deep) if self._post is not None else 0
            began_s = time.monotonic()
            gathering = Gathering(self, deep=deep)
            self._wait_for(gathering.is_over, ANSWER_S + POLL_S)
            views |= {view.rank: view for view in gathering.finish()}
            if self._post is not None:
                self._wait_for(
                    lambda: self._all_answered(number, far), REMOTE_S - (time.monotonic() - began_s)
                )
                views |= self._far_views(number, far)
        return [views.get(rank) or self._unreached(rank) for rank in range(self.size)]

    def ask_host(self) -> list[RankState]:
        """As `ask`, for the ranks that share this one's host only; milliseconds where they answer."""
        gathering = Gathering(self, deep=False)
        self._wait_for(gathering.is_over, ANSWER_S + POLL_S)
        return [self.look(), *gathering.finish()]

    def late_in(self, group: "Group") -> list[int]:
        """Return the group ranks that have begun fewer operations of a group than this one; see `ask`."""
        key, number = group_key(group.ranks, group.ordinal), group.queue.consistency.number
        begun = [view.numbers.get(key, 0) for view in self.ask()]
        return [place for place, rank in enumerate(group.ranks) if begun[rank] < number]

    def give_verdict(self, text: bytes, ranks: Collection[int]) -> None:
        """Let some other ranks know what cannot go on; see `mpisgd.monitor.deadlock_detector`."""
        self.board.give_verdict(text, [self.place[rank] for rank in ranks if rank in self.place])
        if self._post is not None:
            self._post.give_verdict(text, [rank for rank in ranks if rank not in self.place])

    def take_verdicts(self) -> list[bytes]:
        """Return what other ranks have let this one know since this was last called."""
        found = self.board.new_verdicts()
        if self._post is not None:
            found, self._post.verdicts = found + self._post.verdicts, []
        return found

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            self._num_asking += 1
        self.board.wake()
        try:
            yield
        finally:
            with self._lock:
                self._num_asking -= 1

    def _wait_for(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Wait a little."""
        deadline_s = time.monotonic() + limit_s
        while not ready() and time.monotonic() < deadline_s:
            self.pass_time(POLL_S)

    def pass_time(self, seconds: float) -> None:
        """Sleep; on the watch thread, which others may be asking meanwhile, answer first."""
        if threading.current_thread() is self._thread:
            self._answer()
        time.sleep(seconds)

    def _all_answered(self, number: int, far: Sequence[Sequence[int]]) -> bool:
        assert self._post is not None
        answers = self._post.answers
        return all(any((number, rank) in answers for rank in unit[:ASKED_PER_HOST]) for unit in far)

    def _far_views(self, number: int, far: Sequence[Sequence[int]]) -> dict[int, RankState]:
        """Return the views from other hosts; of several by the one that says most."""
        assert self._post is not None
        found: dict[int, RankState] = {}
        for unit in far:
            for rank in unit[:ASKED_PER_HOST]:
                found |= {view.rank: view for view in self._post.answers.get((number, rank), [])}
        self._post.drop(number)
        return found

    def _unreached(self, rank: int) -> RankState:
        why = "does not answer: it is stopped or gone, or its host cannot be reached"
        if self._post is None:
            why = "cannot be asked: MPI runs without thread level MULTIPLE here, and it is on another host"
        return RankState(rank, self.hosts[rank], self.seats[rank].pid, SILENT, note=why)

    # -- answering -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        next_look_s = 0.0
        while not self._over:
            asked = self.board.asked()
            self._answer()
            self._judge.come_by()
            if time.monotonic() > next_look_s:
                self.stalls.tend()
                next_look_s = time.monotonic() + LOOK_S
            self.board.sleep(asked, self._pause_s())

    def _pause_s(self) -> float:
        busy = self._post is not None and (self._num_asking or self._served or self._post.is_busy)
        return POLL_S if busy else LOOK_S

    def _answer(self) -> None:
        """Answer what this rank was asked, here and from other hosts."""
        self._answer_host()
        if self._post is not None:
            for question in self._post.look():
                self._served.append((question, Gathering(self, deep=question.deep)))
            for question, gathering in list(self._served):
                if gathering.is_over():
                    self._served.remove((question, gathering))
                    self._post.give(question, [self.look(), *gathering.finish()])

    def _answer_host(self) -> None:
        if self.board.asked() > self._answered:
            self._answered = self.board.stamp_of_answer()
            self.board.answer(_fitting(self.look()), self._answered)

    def close(self) -> None:
        """Answer no more. Not collective."""
        wait_registry.at_limit = wait_registry.say_nothing
        self.board.leave()
        self._over = True
        self.board.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ANSWER_S)
        self._voice.close()

    def free(self) -> None:
        """Give the communicator back. Collective."""
        if self._post is not None:
            self._post.close()  # the thread may be in the middle of asking
        if self._wire is not None:
            self._wire.free()


def _fitting(view: RankState) -> bytes:
    """Return a view's text, with as many stacks as there is room for."""
    stacks = dict(view.stacks)
    while len(text := encode(RankState(**{**view.__dict__, "stacks": stacks}))) > ANSWER_BYTES and stacks:
        stacks.popitem()
    return text[:ANSWER_BYTES]
