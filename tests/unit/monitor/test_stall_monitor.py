"""The monitor's thread outlives what goes wrong in it, and says so once."""

from __future__ import annotations

from types import SimpleNamespace

from mpisgd.monitor.stall_monitor import StallMonitor


def test_an_error_is_reported_once_and_the_thread_goes_on(capsys):
    """A thread that ends in silence would take stall reports and timeouts inside MPI with it."""
    monitor = StallMonitor.__new__(StallMonitor)
    monitor._has_failed, monitor._is_over = False, False
    monitor.collector = SimpleNamespace(
        shm=SimpleNamespace(asked=lambda: 0), sleep_until_asked=lambda asked: None
    )
    rounds: list[int] = []

    def run_once() -> None:
        rounds.append(len(rounds))
        monitor._is_over = len(rounds) == 3
        if len(rounds) < 3:
            raise KeyError("group 'mine'")

    monitor._run_once = run_once
    monitor._serve()
    assert rounds == [0, 1, 2]
    text = capsys.readouterr().err
    assert text.count("the stall monitor has failed") == 1
    assert "KeyError" in text
