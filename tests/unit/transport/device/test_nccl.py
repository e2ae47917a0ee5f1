"""What NCCL needs of its callers, with a stand-in for NCCL."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import torch

from mpisgd.core.consistency import Operation
from mpisgd.transport.device.nccl import Nccl
from mpisgd.transport.device.nccl_watch import InFlight


def test_two_threads_launch_in_the_order_in_which_they_were_noted():
    """The order was noted first and the launch came after it: another thread could launch in between.

    NCCL wants the same order on all ranks, and what they compare is what was noted.
    """
    noted, launched, threads = [], [], []

    def run(name: str) -> None:
        device.run(
            Operation(name),
            lambda: launched.append(name),
            lambda: None,
            tensors=[],
            device=torch.device("cpu"),
            async_op=True,
        )

    def note(operation: Operation) -> None:
        noted.append(operation.kind)
        if operation.kind == "first":  # and now the other thread has all the time it wants
            threads.append(threading.Thread(target=run, args=("second",)))
            threads[0].start()
            threads[0].join(timeout=0.5)

    queue = SimpleNamespace(note=note, consistency=SimpleNamespace(number=1))
    group = SimpleNamespace(rank=0, size=2, streams=None, queue=queue)
    device = Nccl(group, None, torch.device("cpu"), store=None)
    run("first")
    threads[0].join()
    assert launched == noted == ["first", "second"]


def test_what_the_gpu_has_to_do_is_not_forgotten_where_two_threads_look():
    """Each found the first operation done, and took one away: the second one, too, which was not done.

    `NcclWatch` looks all the time, and so does who waits for an idle GPU before a communicator is split.
    """
    both = threading.Barrier(2)

    def is_completed() -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return True

    queue = SimpleNamespace(consistency=SimpleNamespace(number=1))
    in_flight = InFlight(SimpleNamespace(queue=queue), None)
    in_flight.add(Operation("first"), [SimpleNamespace(is_completed=is_completed)])
    second = in_flight.add(Operation("second"), [SimpleNamespace(is_completed=lambda: False)])
    found = []
    threads = [threading.Thread(target=lambda: found.append(in_flight.first())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [second, second]
