"""States and the loop that starts a function over, with one rank that stands for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpisgd.errors import PeerLost
from mpisgd.horovod import elastic
from mpisgd.horovod import state as horovod_state
from mpisgd.horovod.elastic.common import ObjectState, State, run_fn
from mpisgd.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

REMOVED, ADDED, BOTH = 1, 2, 3


class Recorder(State):
    """Writes down what is asked of it."""

    def __init__(self, bcast_object=lambda obj: obj) -> None:
        super().__init__(bcast_object, lambda: 1)
        self.calls: list[str] = []
        self.register_reset_callbacks(
            [lambda: self.calls.append("first"), lambda: self.calls.append("second")]
        )

    def save(self):
        self.calls.append("save")

    def restore(self):
        self.calls.append("restore")

    def sync(self):
        self.calls.append("sync")

    def reset(self):
        self.calls.append("reset")


def started_over(state, *failures):
    """Run a function that fails in these ways before it returns; what it returns in the end."""
    left = list(failures)

    def train(state, *args, **kwargs):
        state.calls.append("train")
        if left:
            raise left.pop(0)
        return args, kwargs

    return run_fn(train, lambda: state.calls.append("restart"))(state, 1, two=2)


AGAIN = ["restart", "reset", "first", "second"]


def test_a_run_without_failures_syncs_once():
    state = Recorder()
    assert started_over(state) == ((1,), {"two": 2})
    assert state.calls == ["sync", "train"]


def test_after_a_failure_everything_goes_back_to_the_last_commit():
    state = Recorder()
    started_over(state, HorovodInternalError("lost"))
    assert state.calls == ["sync", "train", "restore", *AGAIN, "sync", "train"]


@pytest.mark.parametrize("skip_sync", [False, True])
def test_when_hosts_change_nothing_goes_back(skip_sync):
    state = Recorder()
    started_over(state, HostsUpdatedInterrupt(skip_sync))
    synced = [] if skip_sync else ["sync"]
    assert state.calls == ["sync", "train", *AGAIN, *synced, "train"]


def test_a_failure_after_a_skipped_sync_is_synced_again():
    state = Recorder()
    started_over(state, HostsUpdatedInterrupt(True), HorovodInternalError("lost"))
    assert state.calls[-2:] == ["sync", "train"]
    assert state.calls.count("sync") == 2


def test_other_exceptions_pass():
    with pytest.raises(KeyError):
        started_over(Recorder(), KeyError("no such thing"))


def test_a_failure_that_comes_for_ever_is_raised():
    state = Recorder()
    with pytest.raises(HorovodInternalError, match="for ever"):
        started_over(state, *[HorovodInternalError("for ever")] * 5)
    assert state.calls.count("train") == 3


def test_failures_that_differ_or_are_behind_a_commit_go_on():
    state = Recorder()
    started_over(state, *[HorovodInternalError(f"failure {i}") for i in range(5)])
    attempts = iter(range(6))

    def train(state):
        state.commit()
        if next(attempts) < 5:
            raise HorovodInternalError("the same")

    run_fn(train, lambda: None)(state)


def test_after_a_loss_there_is_no_way_on(monkeypatch):
    lost = PeerLost("rank 1 went away")
    monkeypatch.setattr(
        horovod_state, "_running", lambda: SimpleNamespace(queue=SimpleNamespace(broken=lost))
    )
    recorder = Recorder()

    def train(state):
        raise HorovodInternalError("an operation failed")

    with pytest.raises(HorovodInternalError, match="rank 1 went away; start the job again"):
        elastic.run(train)(recorder)
    assert recorder.calls == ["sync", "restore"]


@pytest.mark.parametrize(
    ("told", "skip_sync"),
    [
        ([(1, REMOVED)], True),
        ([(1, ADDED)], False),
        ([(1, REMOVED), (2, ADDED)], False),
        ([(3, BOTH)], False),
    ],
)
def test_a_check_tells_of_changed_hosts_once(told, skip_sync):
    state = Recorder()
    state.check_host_updates()
    for message in told:
        state.on_hosts_updated(*message)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    assert state.calls == ["save"]
    state.on_hosts_updated(*told[-1])  # no newer than what is known
    state.commit()


def test_a_reset_forgets_what_was_told():
    state = Recorder()
    state.on_hosts_updated(1, ADDED)
    state.on_reset()
    state.check_host_updates()


def test_the_word_of_the_first_rank_counts():
    state = Recorder(bcast_object=lambda obj: (0, 7, REMOVED))
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    ignored = Recorder(bcast_object=lambda obj: (0, 0, 0))
    ignored.on_hosts_updated(5, ADDED)
    ignored.check_host_updates()


def test_objects_go_back_with_what_is_in_them():
    state = ObjectState(lambda obj: obj, lambda: 0, epoch=3, losses=[1.0])
    state.epoch, state.losses[0] = 4, 2.0
    state.restore()
    assert (state.epoch, state.losses) == (3, [1.0])
    state.losses.append(0.5)
    state.commit()
    state.losses.clear()
    for _ in range(2):
        state.restore()
        assert state.losses == [1.0, 0.5]
        state.losses.append(9.0)


def test_objects_become_those_of_the_first_rank_and_stay():
    state = ObjectState(lambda obj: {"epoch": 8}, lambda: 1, epoch=3)
    state.sync()
    assert state.epoch == 8
    state.epoch = 9
    state.restore()
    assert state.epoch == 8
