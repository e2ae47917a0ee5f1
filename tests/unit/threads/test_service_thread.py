"""A thread of ours outlives what goes wrong in it, and says so once."""

from __future__ import annotations

from mpisgd.threads import service_thread
from mpisgd.threads.service_thread import ServiceThread


def test_an_error_is_printed_once_and_the_thread_goes_on(capsys, monkeypatch):
    """Each thread ended by the first error: stall reports, timeouts inside MPI, the detection of losses,
    the futures of messages ended with it, in silence."""
    monkeypatch.setattr(service_thread, "PAUSE_S", 0.0)
    rounds: list[int] = []

    def serve() -> bool:
        rounds.append(len(rounds))
        if len(rounds) < 4:
            raise KeyError("group 'mine'")
        return False

    thread = ServiceThread("mpisgd test", serve, what="the stall monitor")
    thread.start()
    thread.join_from_others(10.0)
    assert rounds == [0, 1, 2, 3]
    text = capsys.readouterr().err
    assert text.count("the stall monitor has failed, and tries again") == 1
    assert "KeyError" in text
