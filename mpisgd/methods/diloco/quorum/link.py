"""`Link`: a learner's side of the messages to the rank with the outer parameters of `DiLoCo(quorum=)`."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.errors import CollectiveTimeout, LearnerLost, PeerLost
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.methods.diloco.quorum.messages import (
    ASK_TAG,
    BEHIND_TAG,
    DONE,
    GONE,
    MINE_TAG,
    NEWEST_TAG,
    TAKE,
    TOLD_TAG,
    Said,
    Told,
)
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.rma.patience import wait_patiently
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import add_pending_message, remove_pending_message

__all__ = ["Link"]


class Link:
    """Says something, and waits for what it is told. The loss of another learner does not end that.

    Args:
        communicator: of the learners; its first rank has the outer parameters.
        form: what is sent, and what is received.
        group: name of the group.
        server: the global rank of the first one.
        timeout_s: how long it waits.
        check: raises where a rank of this learner is lost, which ends its waits.

    Attributes:
        form: as given.
    """

    def __init__(
        self,
        communicator: GroupCommunicator,
        form: FlatCopy,
        group: str,
        server: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self.form = form
        self._check = check
        self._communicator, self._group, self._server = communicator, group, server
        self._timeout_s = timeout_s
        self._newer = torch.zeros(1, dtype=torch.int64)
        self._news = communicator.irecv(self._newer, 0, BEHIND_TAG)

    def is_behind(self, version: int) -> bool:
        """Return whether an outer step was taken without this learner.

        Args:
            version: of the outer parameters from which it began. What is told of earlier ones is over.

        Raises:
            PeerLost: the first rank is lost.
        """
        found = False
        try:
            while self._communicator.poll_one(self._news) is not None:
                found |= int(self._newer) > version
                self._news = self._communicator.irecv(self._newer, 0, BEHIND_TAG)
        except PeerLost as exc:
            raise self._loss from exc
        return found

    def close(self) -> None:
        """Receive no more."""
        with contextlib.suppress(PeerLost):  # a lost job has nothing to be cancelled
            self.is_behind(0)
            self._communicator.cancel(self._news, self._newer)

    @property
    def _loss(self) -> PeerLost:
        return PeerLost(f"DiLoCo(quorum=): rank {self._server} was lost, which has the outer parameters")

    def give_up(self) -> None:
        """Say that a rank of this learner is lost, without waiting; from any thread."""
        words = Said(GONE).words
        with contextlib.suppress(PeerLost):
            self._communicator.abandon([self._communicator.isend(words, 0, ASK_TAG)], words)

    def tell(self, said: Said) -> None:
        """Say something that is not answered.

        Raises:
            PeerLost: the first rank is lost.
        """
        words = said.words
        self._move([self._communicator.isend(words, 0, ASK_TAG)], (words,))

    def ask(self, said: Said, *, sends: bool = False, limit_s: float | None = None) -> Told:
        """Say something; return what this learner is told, with the outer parameters in `form` if it is TAKE.

        Args:
            said: what.
            sends: whether `form` follows.
            limit_s: instead of the timeout.

        Raises:
            PeerLost: the first rank is lost.
            LearnerLost: a rank of this learner is.
            CollectiveTimeout: it has not answered: there was no quorum.
        """
        communicator, words, told = self._communicator, said.words, Told().words
        answer = communicator.irecv(told, 0, TOLD_TAG)
        sent = [communicator.isend(words, 0, ASK_TAG)]
        if sends:
            sent.append(communicator.isend(self.form.memory, 0, MINE_TAG))
        memory = (words, told, self.form.memory)
        self._move(sent, memory)
        what = "a quorum of the learners of DiLoCo"
        if said.kind == DONE:
            what = "learners of DiLoCo that have not called synchronizer.finish()"
        self._wait([answer], memory, self._timeout_s if limit_s is None else limit_s, what)
        heard = Told(*told.tolist())
        if heard.kind == TAKE:
            self._move([communicator.irecv(self.form.memory, 0, NEWEST_TAG)], memory)
        return heard

    def _move(self, requests: Sequence[Request], memory: tuple[Tensor, ...]) -> None:
        """Wait for what is under way: messages of which each poll moves a part."""
        add_pending_message(self)
        try:
            self._wait(requests, memory, self._timeout_s)
        finally:
            remove_pending_message(self)

    def _wait(
        self,
        requests: Sequence[Request],
        memory: tuple[Tensor, ...],
        limit_s: float,
        what: str = "the rank with the outer parameters of DiLoCo",
    ) -> None:
        lost: list[PeerLost] = []  # the first rank is
        ended: list[LearnerLost] = []
        left = list(requests)

        def ready() -> bool:
            try:  # one by one: of several, MPI does not say why they fail
                left[:] = [each for each in left if self._communicator.poll_one(each) is None]
                self._check()
                return not left
            except LearnerLost as exc:
                ended.append(exc)
                return True
            except PeerLost as exc:
                lost.append(exc)
                return True

        def reason() -> WaitReason:
            return WaitReason(what, self._group)

        done = wait_patiently(ready, limit_s, reason)
        if lost or ended or not done:
            self._communicator.abandon(left, memory)
        if ended:
            raise ended[0]
        if lost:
            raise self._loss from lost[0]
        if not done:
            raise CollectiveTimeout(
                f"DiLoCo(quorum=): waited {limit_s:.1f} s for a quorum of the learners; the others are late, "
                "have ended without synchronizer.finish(), or do not call state_dict() where this one has"
            )
