"""The messages between hosts, by stand-ins for MPI's."""

from __future__ import annotations

from mpisgd.monitor.mpi_mailbox import MpiMailbox


class Freed:
    """A wire whose communicator has been given back: MPI ends the job of whoever uses it."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of a communicator that is no more")


def test_a_thread_that_is_late_leaves_a_closed_post_alone():
    post = MpiMailbox(Freed())
    post.close()
    assert post.look() == []
    post.give_verdict(b"nothing can go on", [1])
    assert post.ask([[1, 2], [3]], deep=False) == 1  # numbered as ever, sent to nobody
