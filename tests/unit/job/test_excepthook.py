"""The exception hooks of a job are taken, and given back as they were."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD

import mpisgd
from mpisgd.errors import Deadlock, LearnerLost
from mpisgd.job import excepthook
from mpisgd.job.excepthook import ExceptHook
from mpisgd.monitor.rank_snapshot import failed_threads, take_snapshot
from mpisgd.monitor.state_collector import ANSWER_S, QUESTIONS_S


@pytest.fixture
def seen(monkeypatch):
    """What the hook of before has been given; the job's stands in front of it."""
    found: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_type))
    hooks = ExceptHook(SimpleNamespace(), None, None, lambda code: None)
    hooks.install()
    yield found
    hooks.remove()


def run(target, name: str) -> None:
    thread = threading.Thread(target=target, name=name)
    thread.start()
    thread.join()


def fail() -> None:
    raise ValueError("a bad batch")


def test_what_ended_a_thread_is_kept_and_passed_on(seen):
    run(fail, "loader")
    assert seen == [ValueError]
    (text,) = take_snapshot(0, "here", [], stacks=False).failed_threads
    assert text.startswith("thread 'loader' ended 0.")
    assert "ago with ValueError: a bad batch, at " in text
    assert text.endswith("in fail")


def test_an_orderly_end_of_a_thread_is_no_failure(seen):
    run(sys.exit, "loader")
    assert seen == [SystemExit]
    assert not failed_threads


def test_the_hooks_are_given_back_and_what_was_kept_is_gone():
    before = sys.excepthook, threading.excepthook
    hooks = ExceptHook(SimpleNamespace(), None, None, lambda code: None)
    hooks.install()
    assert threading.excepthook != before[1]
    hooks.remove()
    assert (sys.excepthook, threading.excepthook) == before
    assert not failed_threads


def test_hooks_that_someone_else_has_taken_since_stay(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    hooks = ExceptHook(SimpleNamespace(), None, None, lambda code: None)
    hooks.install()
    threading.excepthook = mine = lambda args: None
    hooks.remove()
    assert threading.excepthook is mine


def test_the_code_of_sys_exit_is_kept_until_the_program_goes_on():
    progress = [5]
    hooks = ExceptHook(SimpleNamespace(), None, None, lambda code: None, lambda: progress[0])
    before = sys.exit
    hooks.install()
    try:
        for status, code in ((3, 3), ("an error", 1), (None, 0), (0, 0), (256 + 2, 2)):
            with pytest.raises(SystemExit) as caught:
                sys.exit(status)
            assert caught.value.code == status
            assert hooks.exit_code() == code
        progress[0] += 1  # it has caught that, and calls operations again
        assert hooks.exit_code() == 0
    finally:
        hooks.remove()
    assert sys.exit is before


@pytest.mark.parametrize(
    ("rank", "host", "error", "at_least_s"),
    [
        (0, 0, Deadlock("all"), 0.0),
        (1, 0, Deadlock("all"), 0.1),
        (2, 1, Deadlock("all"), QUESTIONS_S + ANSWER_S),  # within that the first host's rank has heard of it
        (2, 1, ValueError("mine"), 0.1),
        (1, 0, ValueError("mine"), 0.0),
    ],
)
def test_who_prints_later_waits_until_who_prints_first_can_have_raised(pauses, rank, host, error, at_least_s):
    ended: list[float] = []
    claim = SimpleNamespace(claim_error=lambda _: ended.append(sum(pauses)))  # None: another one prints
    topology = SimpleNamespace(node_rank=host, hostnames=["a", "b"])
    hooks = ExceptHook(SimpleNamespace(rank=rank, size=3), topology, claim, lambda code: None)
    with pytest.raises(SystemExit):
        hooks.fail(error)
    assert ended[0] >= at_least_s
    assert (ended[0] == 0.0) == (at_least_s == 0.0)


def test_a_cause_inside_of_mpisgd_is_left_out_and_one_of_the_program_is_shown(monkeypatch):
    def shown(filename: str) -> str:
        code = compile("1 / 0", filename, "exec")
        try:
            exec(code)
        except ZeroDivisionError as cause:
            cause.__traceback__ = cause.__traceback__.tb_next  # as if the frame before were not there
            error = mpisgd.errors.MpiFailed("it failed")
            error.__cause__ = cause
            return excepthook._formatted(error)

    assert "ZeroDivisionError" in shown("train.py")
    assert "ZeroDivisionError" not in shown(excepthook.__file__)
    monkeypatch.setenv("MPISGD_FULL_TRACEBACK", "1")
    assert "ZeroDivisionError" in shown(excepthook.__file__)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mpisgd.all_reduce(
            "no tensor"
        ),  # outside of a job, or no tensor: one of our errors in any case
        lambda: mpisgd.DistributedOptimizer(SGD([torch.ones(1)], 0.1), compress=None),
        lambda: mpisgd.DistributedOptimizer(SGD([torch.ones(1)], 0.1), [], None),
    ],
)
def test_an_error_of_ours_is_shown_up_to_the_line_of_the_program(call, monkeypatch):
    def lines() -> list[str]:
        try:
            call()
        except (mpisgd.MpisgdError, TypeError) as exc:
            return excepthook._formatted(exc).splitlines()

    last = [line for line in lines() if line.startswith("  File ")][-1]
    assert "test_excepthook.py" in last
    monkeypatch.setenv("MPISGD_FULL_TRACEBACK", "1")


def test_a_rank_without_which_the_job_goes_on_ends_alone(monkeypatch, capsys):
    """After what it has to do before; nobody else is ended."""
    done: list[str] = []
    topology = SimpleNamespace(hostnames=("node1",), node_rank=0)
    hooks = ExceptHook(SimpleNamespace(rank=3, size=4), topology, None, lambda code: done.append("the job"))
    hooks.leaving = [lambda: done.append("served")]

    def leave(code: int) -> None:
        done.append(f"exit {code}")
        raise SystemExit

    monkeypatch.setattr(excepthook.os, "_exit", leave)
    with pytest.raises(SystemExit):
        hooks.fail(LearnerLost("rank 2 was lost"))
    assert done == ["served", "exit 0"]
    told = capsys.readouterr().err
    assert "rank 3 of 4 on node1 raised, and ends; the job goes on without it: rank 2 was lost" in told
    assert "Traceback" not in told
