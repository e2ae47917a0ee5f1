"""`FailureDetector` beside a communicator that news reaches at a chosen moment."""

import threading
import time

import pytest

from mpisgd.core.failure_scope import FailureScope
from mpisgd.errors import CollectiveTimeout, PeerLost
from mpisgd.monitor.failure_detector import FailureDetector
from mpisgd.threads import waiting


class Messages:
    """News that are on their way, and come in while somebody asks which ranks are lost."""

    def __init__(self, *names: str) -> None:
        self.on_their_way = list(names)
        self.arrived: set[str] = set()

    def move(self) -> None:
        self.arrived.update(self.on_their_way)


class Communicator:
    def __init__(self, name: str, messages: Messages) -> None:
        self.name = name
        self.messages = messages
        self.children = iter(("overdue", "aborted"))

    def lost(self) -> list[int]:
        self.messages.move()
        return [2] if "loss" in self.messages.arrived else []

    def is_revoked(self) -> bool:
        return self.name in self.messages.arrived

    def duplicate(self, *, apart: bool) -> "Communicator":
        assert apart
        return Communicator(next(self.children), self.messages)


class Untouched:
    """Ranks 0 and 1, of which none is lost."""

    def is_revoked(self) -> bool:
        return False

    def revoke_family(self) -> None:
        pass


class FaultTolerance:
    overdue = "a call was blocked"

    def __init__(self) -> None:
        self.polls = threading.Semaphore(0)

    def wait_for_news(self, stopped: threading.Event, limit_s: float) -> bool:
        del limit_s
        self.polls.acquire()
        return stopped.is_set()

    def revoke_all(self) -> None:
        pass

    def set_apart(self, communicator) -> None:
        pass


@pytest.mark.parametrize(
    ("news", "error", "text"),
    [
        (("world", "overdue"), CollectiveTimeout, "a call was blocked"),
        (("world",), PeerLost, "as another rank has found out"),
        (("world", "loss"), PeerLost, "rank 2 of the job was lost"),
    ],
)
def test_the_reason_of_a_revocation_is_read_after_the_revocation(news, error, text):
    """Both come in between two questions: a late rank was taken for a lost one, and the job recovered."""
    fault_tolerance = FaultTolerance()
    detector = FailureDetector(Communicator("world", Messages(*news)), fault_tolerance)
    scope = FailureScope([0, 1], Untouched(), PeerLost)
    detector.scopes.append(scope)
    try:
        detector.enable_abort([], 0)
        fault_tolerance.polls.release()
        deadline_s = time.monotonic() + 10
        while (reason := waiting.cancel_reason()) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert type(reason) is error
        assert text in str(reason)
        if error is CollectiveTimeout:  # which no part of the job outlives
            while scope.error is None and time.monotonic() < deadline_s:
                time.sleep(0.01)
        assert type(scope.error) is (CollectiveTimeout if error is CollectiveTimeout else type(None))
    finally:
        detector._stopped.set()
        fault_tolerance.polls.release()
        detector.stop()
        waiting.allow_waits()
