"""`Syncer`: the thread of the rank that has the outer parameters of `DiLoCo(quorum=)`.

    a learner, every `sync_every` steps      the syncer
    sends its parameters                     notes them: they are of the round that is open
                                             waits for the quorum, then for the grace: an outer step
    receives the outer parameters            sends them to all of this round

A learner without which a round was over is told so, and sends what it has. It is sent the newest outer
parameters at once, with how long it trains until the others arrive, too. What a learner sends after its state
was saved is noted when this rank's was saved, too, so that what all have saved goes together. All receives
are from a learner by its number, and each is asked for by itself: those of one that is lost fail alone, and
MPI says why.
"""

import threading
from collections.abc import Callable, Set

import torch

from mpisgd.errors import PeerLost
from mpisgd.event_log import Entry, EventLog, Place
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.methods.diloco.quorum.messages import (
    ASK_TAG,
    BEHIND_TAG,
    CLOSE,
    DONE,
    ENTER,
    FAILED,
    FEW,
    GONE,
    MINE_TAG,
    MIXED,
    NEWEST_TAG,
    OTHER_STATE,
    SAVE,
    STALLED,
    TAKE,
    TOLD_TAG,
    Said,
    Told,
)
from mpisgd.methods.diloco.quorum.rounds import Rounds
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.threads import wait_registry
from mpisgd.threads.scheduling import join, now_s, sleep
from mpisgd.threads.service_thread import InheritingThread

__all__ = ["PLACE", "Syncer"]

PLACE = "the outer parameters"  # in an event log
SHORT_SLEEP_S, LONG_SLEEP_S = 0.0001, 0.005
SHARE = 1 / 20  # a pause is this share of how long nothing has happened


class _Learner:
    """What is known of a learner.

    Attributes:
        rank: of the communicator.
        said: where its next message comes.
        request: of that.
        sent: the parameters that follow it, and their request; None where nothing is under way.
        arrived: parameters that are not noted before the first rank has saved; None where there are none.
        told: what is being sent to it, with the memory that it is sent from.
        news: likewise, that it is behind; it may be stopped, and receive that much later.
        entered: the number of its last entering.
        saved_at: how many steps it had taken when its state was last saved.
        waits: whether it waits for the end of the round.
        is_told: whether it was told that it is behind, and has not come since.
        is_done: whether it trains no more.
        ends: whether it ends the exchanges.
        is_lost: whether it is gone.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.said = Said().words
        self.request: Request | None = None
        self.sent: tuple[FlatCopy, Request] | None = None
        self.arrived: FlatCopy | None = None
        self.told: list[tuple[torch.Tensor, Request]] = []
        self.news: list[tuple[torch.Tensor, Request]] = []
        self.entered = self.saved_at = 0
        self.waits = self.is_told = self.is_done = self.ends = self.is_lost = False

    @property
    def trains(self) -> bool:
        """Whether it may come to another outer step."""
        return not (self.is_lost or self.is_done or self.ends)


class Syncer:
    """Serves all learners, this rank's among them, from its making until all have ended or are lost.

    Args:
        communicator: of its own; the learners are its ranks.
        rounds: the outer parameters.
        quorum: learners that an outer step needs.
        limit_s: how long those that train no more wait while nobody else says anything.
        events: of what happens to the outer parameters; None: that is not recorded.
        is_given_up: whether the ranks are no job any more, which ends the thread, too.

    Attributes:
        rounds: as given; `lock` before use.
        lock: held while these change.
        error: what has ended the thread, if anything.
    """

    def __init__(
        self,
        communicator: GroupCommunicator,
        rounds: Rounds,
        quorum: int,
        limit_s: float,
        events: EventLog | None,
        is_given_up: Callable[[], bool],
    ) -> None:
        self.rounds, self.lock = rounds, threading.Lock()
        self.error: Exception | None = None
        self._communicator, self._quorum, self._events = communicator, quorum, events
        self._is_given_up, self._limit_s = is_given_up, limit_s
        self._number = 0  # of what has happened to the outer parameters
        self._has_ended = False
        self._has_strangers = False  # who began from outer parameters that were never here
        self._saves_at = 0  # the number of steps of a save for which this rank waits; 0: it does not
        self._saved_at = 0  # that of its latest save
        self._learners = [_Learner(rank) for rank in range(communicator.size)]
        for learner in self._learners:
            self._listen(learner)
            if rounds.is_behind(learner.rank):
                self._tell_behind(learner)
        self._thread = InheritingThread(target=self._run, name="mpisgd DiLoCo", daemon=True)
        self._thread.start()

    def have_saved(self, steps: int) -> bool:
        """Return whether all other learners that are left are being saved, too, after so many steps.

        What they save then belongs to the outer parameters as they are: what a learner brings after its own
        save is noted after `end_save`. Until then those that have taken fewer steps do not wait for an outer
        step, to which the others would not come.
        """
        with self.lock:
            others = [each for each in self._learners if each.rank != self._communicator.rank]
            are_there = all(each.saved_at >= steps for each in others if each.trains)
            self._saves_at = 0 if are_there else steps
            return self.error is not None or are_there

    def end_save(self, steps: int) -> None:
        """Note that this rank has saved, after so many steps, or has given that up."""
        with self.lock:
            self._saves_at, self._saved_at = 0, steps

    def join(self) -> None:
        """Wait until the thread has ended, as it does when all learners that are left have."""
        join(self._thread, None)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_registry.workers[threading.get_ident()] = lambda: False  # nobody's operation waits for it
        last_s = now_s()
        try:
            with torch.no_grad():
                while not self._is_over():
                    if self._advance():
                        last_s = now_s()
                    elif now_s() - last_s > self._limit_s:
                        self._end_patience()
                        last_s = now_s()
                    is_sending = any(each.sent or each.told for each in self._learners if not each.is_lost)
                    waited_s = 0.0 if is_sending else now_s() - last_s
                    sleep(min(LONG_SLEEP_S, max(SHORT_SLEEP_S, waited_s * SHARE)))
        except Exception as exc:  # whatever it is: without this thread the learners would wait in silence
            self.error = exc
            for learner in self._learners:
                self._unless_lost(learner, lambda each: self._tell(each, FAILED))
        finally:
            for learner in self._learners:
                requests = [learner.request] if learner.request is not None else []
                sent = (*learner.told, *learner.news, *filter(None, [learner.sent]))
                requests += [request for _, request in sent]
                self._communicator.abandon(requests, (learner.said, sent))
            del wait_registry.workers[threading.get_ident()]

    def _is_over(self) -> bool:
        return self._is_given_up() or (
            self._has_ended and not any(each.told for each in self._learners if not each.is_lost)
        )

    def _advance(self) -> bool:
        """Go on with what is under way; return whether anything has happened."""
        happened = False
        for learner in self._learners:
            if not learner.is_lost:
                happened |= self._unless_lost(learner, self._serve)
        with self.lock:
            left = [each for each in self._learners if not each.is_lost]
            training = {each.rank for each in left if not each.is_done}
            if self._has_strangers:
                self._refuse(OTHER_STATE)
            elif self.rounds.is_mixed:
                self._refuse(MIXED)
            elif len(left) < self._quorum:
                self._refuse(FEW)
            elif self.rounds.is_over(training, now_s()):
                self._take_outer_step()
                happened = True
            elif self._saves_at:
                happened |= self._let_go(self._saves_at)
            elif self._lacks_ahead(training):
                happened |= self._let_go(max(each.saved_at for each in left))
        if not self._has_ended and all(each.is_done or each.ends for each in left):
            self._has_ended = happened = True
            for learner in left:
                self._unless_lost(learner, lambda each: self._tell(each, TAKE))
        return happened

    def _end_patience(self) -> None:
        """Tell those that wait in `finish` that the others do nothing; they are gone then, with an error."""
        for learner in self._learners:
            if learner.is_done and not learner.is_lost:
                self._unless_lost(learner, lambda each: self._tell(each, STALLED))
                learner.is_lost = True

    def _unless_lost(self, learner: _Learner, serve: Callable[[_Learner], bool]) -> bool:
        try:
            return serve(learner)
        except PeerLost:
            with self.lock:
                self._lose(learner)
            return True

    def _lose(self, learner: _Learner) -> None:
        """Note that a learner is gone; what it has brought stays in its round. `lock` is held."""
        learner.is_lost, learner.waits, learner.sent, learner.arrived = True, False, None, None
        learner.told, learner.news = [], []
        self.rounds.lose(learner.rank)

    def _serve(self, learner: _Learner) -> bool:
        """Take what a learner says; return whether it was something."""
        communicator = self._communicator
        learner.told = [each for each in learner.told if communicator.poll_one(each[1]) is None]
        learner.news = [each for each in learner.news if communicator.poll_one(each[1]) is None]
        if learner.sent is not None:
            copy, request = learner.sent
            if communicator.poll_one(request) is None:
                return False
            learner.sent, learner.arrived = None, copy
        if learner.arrived is not None:
            if self._is_ahead(learner):
                return False
            copy, learner.arrived = learner.arrived, None
            self._enter(learner, copy)
            return True
        if learner.request is None or communicator.poll_one(learner.request) is None:
            return False
        learner.request = None
        said = Said(*learner.said.tolist())
        if said.kind == ENTER:
            copy = self.rounds.newest.new_like()
            learner.sent = copy, communicator.irecv(copy.memory, learner.rank, MINE_TAG)
        elif said.kind == SAVE:
            learner.saved_at = said.steps
            self._listen(learner)
        elif said.kind == DONE:
            learner.is_done = True
        elif said.kind == GONE:
            with self.lock:
                self._lose(learner)
        else:
            assert said.kind == CLOSE, said
            learner.ends = True
        return True

    def _listen(self, learner: _Learner) -> None:
        learner.request = self._communicator.irecv(learner.said, learner.rank, ASK_TAG)

    def _enter(self, learner: _Learner, copy: FlatCopy) -> None:
        """Note parameters that have come. A late learner gets the newest ones at once."""
        said = Said(*learner.said.tolist())
        with self.lock:
            learner.entered, learner.waits, learner.is_told = self._next_number(), True, False
            if not self.rounds.knows(said.base):
                self._has_strangers = True
            elif self.rounds.enter(learner.rank, said, copy) and not self.rounds.is_mixed:
                self._answer(learner, TAKE)
        self._listen(learner)

    # -- outer steps --------------------------------------------------------------------------------

    def _take_outer_step(self) -> None:
        learners = self.rounds.step(now_s())
        if self._events is not None:
            self._events.add(Entry("outer", learners, place=Place(PLACE, self._next_number())))
        for learner in self._learners:
            if learner.waits:
                self._answer(learner, TAKE)
            elif learner.trains and not learner.is_told and self.rounds.is_behind(learner.rank):
                self._tell_behind(learner)

    def _tell_behind(self, learner: _Learner) -> None:
        """Tell a learner that an outer step was taken without it; `lock` is held."""
        newer = torch.tensor([self.rounds.version])
        learner.is_told = True
        try:
            learner.news.append((newer, self._communicator.isend(newer, learner.rank, BEHIND_TAG)))
        except PeerLost:
            self._lose(learner)

    def _is_ahead(self, learner: _Learner) -> bool:
        """Return whether a learner is being saved after more steps than this rank has been."""
        return learner.saved_at > self._saved_at and self._learners[self._communicator.rank].trains

    def _lacks_ahead(self, training: Set[int]) -> bool:
        """Return whether the quorum lacks learners that have arrived, and are ahead of this rank's save."""
        ahead = {each.rank for each in self._learners if each.arrived is not None and self._is_ahead(each)}
        arrived = {each.learner for each in self.rounds.pending}
        return len(arrived | (training - ahead)) < min(self._quorum, len(arrived | training))

    def _let_go(self, saves_at: int) -> bool:
        """Let those go on that wait, and have not been saved after so many steps; return whether any do."""
        waiting = [each for each in self._learners if each.waits and each.saved_at < saves_at]
        for learner in waiting:
            self.rounds.let_go(learner.rank)
            self._answer(learner, TAKE)
        return bool(waiting)

    def _refuse(self, why: int) -> None:
        """Tell those that wait why there is no outer step."""
        for learner in self._learners:
            if learner.waits:
                self._answer(learner, why)

    def _answer(self, learner: _Learner, kind: int) -> None:
        """Answer one that waits; `lock` is held."""
        learner.waits = False
        try:
            self._tell(learner, kind)
        except PeerLost:
            self._lose(learner)

    def _tell(self, learner: _Learner, kind: int) -> bool:
        left = sum(not each.is_lost for each in self._learners)
        late = next((each.rank for each in self._learners if each.trains), 0)
        is_alone = not any(each.trains for each in self._learners if each is not learner)
        trains_s = None if is_alone else self.rounds.left_s(learner.rank, now_s())
        left_us = -1 if trains_s is None else int(trains_s * 1e6)
        version, number = self.rounds.version, self._next_number()
        told = Told(kind, version, learner.entered, number, left, late, left_us).words
        communicator = self._communicator
        learner.told.append((told, communicator.isend(told, learner.rank, TOLD_TAG)))
        if kind == TAKE:
            memory = self.rounds.published.memory
            learner.told.append((memory, communicator.isend(memory, learner.rank, NEWEST_TAG)))
            self.rounds.take(learner.rank)
        return True

    def _next_number(self) -> int:
        self._number += 1
        return self._number
