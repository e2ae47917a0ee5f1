"""What a `Work` promises to whoever waits for it."""

from __future__ import annotations

import threading
import time

from mpisgd.core.work import QueuedWork
from mpisgd.threads.callbacks import Callbacks


class Queue:
    """A queue in which nothing is."""

    callbacks = Callbacks("mine", lambda: 5.0)

    def run_until(self, ended) -> None:
        pass


class SlowToSettle(QueuedWork):
    """Lets whoever waits run on before the future has its value."""

    def _settle(self, future):
        time.sleep(0.05)
        super()._settle(future)


def test_the_future_has_its_value_when_wait_returns():
    work = SlowToSettle("all_reduce", "tensors", Queue())
    future = work.get_future()
    thread = threading.Thread(target=work.complete, args=(None,))
    thread.start()
    work.wait()
    assert future.done()
    assert future.value() == "tensors"
    thread.join()


def test_a_callback_may_wait_for_its_own_operation():
    work = QueuedWork("all_reduce", "tensors", Queue())
    seen = work.get_future().then(lambda _: work.wait())
    work.complete(None)
    assert seen.wait() is True
