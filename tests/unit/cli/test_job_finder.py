"""Jobs are found by who has started them, through /proc; whoever has found one can ask its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mpisgd.errors import JobError
from mpisgd.monitor.mailbox_pages import INTRODUCTION, MAILBOX_NAME, SHARE_BYTES, Introduction, MailboxPages
from mpisgd.monitor.process_inspector import ProcessIdentity, start_ticks
from mpisgd.monitor.rank_state import GONE, LEFT, RUNS, STOPPED, RankState, encode
from mpisgd.monitor.shm_mailbox import ShmMailbox
from mpisgd.monitor.step_counter import counter
from mpisgd.tools.cli import job_finder
from mpisgd.tools.cli.job_finder import FoundJob, choose_job, describe, find_jobs, launching_users
from mpisgd.transport.ipc.memfd import create
from mpisgd.transport.ipc.segment import Segment

if not hasattr(os, "memfd_create"):
    pytest.skip("no memfd on this system", allow_module_level=True)

NOBODY = 65534
HOLDERS: dict[int, subprocess.Popen[bytes]] = {}


@pytest.fixture
def made() -> Iterator[list[ShmMailbox]]:
    """The mailboxes of a test, closed after it; the steps are counted elsewhere again."""
    mailboxes: list[ShmMailbox] = []
    yield mailboxes
    for mailbox in mailboxes:
        mailbox.close()
    counter.words = [0, 0, 0]


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for another rank."""
    text = "import sys\nfor path in sys.stdin: held = open(path.strip()); print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    HOLDERS[process.pid] = process
    with process:
        yield process
        process.kill()


def job(made: list[ShmMailbox], number: int, pids: list[int], *, size: int = 0, answering: bool = False):
    """The mailboxes of the ranks of a job, all in this process; `pids` is where they say they are."""
    segment = Segment(create(SHARE_BYTES * len(pids), MAILBOX_NAME), SHARE_BYTES, len(pids))
    for pid in set(pids) - {os.getpid()}:  # whoever says to be a rank has the file open
        process = HOLDERS[pid]
        process.stdin.write(f"/proc/{os.getpid()}/fd/{segment._fd}\n".encode())
        process.stdin.flush()
        process.stdout.readline()
    mailboxes = [ShmMailbox(segment, range(len(pids)), rank) for rank in range(len(pids))]
    for rank, pid in enumerate(pids):
        process = ProcessIdentity(pid, start_ticks(pid), -1)
        mailboxes[rank].introduce(Introduction(rank, size or len(pids), number, process, answering))
    made += mailboxes
    return mailboxes


def found(number: int) -> FoundJob | None:
    jobs = {member.who.job: job for job in find_jobs() for member in job.members.values()}
    return jobs.get(number)


def test_a_job_is_found_with_its_ranks_and_their_steps(made):
    job(made, 77, [os.getpid()] * 2, size=5)
    counter.words[:] = memoryview(b"".join(n.to_bytes(8, sys.byteorder) for n in (12, 34, 56))).cast("Q")
    seen = found(77)
    assert seen is not None
    assert (list(seen.members), seen.size, seen.pids) == ([0, 1], 5, [os.getpid()] * 2)
    assert seen.members[1].steps == (12, 34, 56)
    assert describe(seen).startswith("2 of 5 ranks here: ")
    assert "pytest" in describe(seen)
    assert [state.state for state in seen.states()] == [RUNS, RUNS]  # they have no thread that answers


def test_one_that_has_been_left_is_none(made):
    (mailbox,) = job(made, 78, [os.getpid()])
    assert found(78) is not None
    mailbox.close()
    assert found(78) is None


def test_ranks_answer_or_are_described_from_outside(made, other):
    boxes = job(made, 79, [os.getpid(), other.pid, os.getpid()], answering=True)
    seen, over = found(79), threading.Event()
    assert seen is not None

    def answer() -> None:
        while not over.is_set():
            for stamp in boxes[0].questions():
                boxes[0].answer(stamp, encode([RankState(0, "here", note="as I say")]))
            over.wait(0.005)

    thread = threading.Thread(target=answer)
    thread.start()
    boxes[2].close()
    try:
        os.kill(other.pid, signal.SIGSTOP)
        states = seen.states("here")
        assert [state.state for state in states] == [RUNS, STOPPED, LEFT]
        assert states[0].note == "as I say"
        other.kill()
        other.wait()
        assert seen.states()[1].state == GONE
    finally:
        over.set()
        thread.join()


def test_a_job_of_another_version_is_not_read(made):
    (mailbox,) = job(made, 80, [os.getpid()])
    mailbox._mine[INTRODUCTION] += 1
    assert mailbox.introduction(0) is None


def test_of_several_jobs_one_is_chosen_by_a_process(made, other, monkeypatch):
    job(made, 81, [os.getpid()])
    job(made, 82, [other.pid])
    assert choose_job(other.pid).pids == [other.pid]
    with pytest.raises(JobError, match=rf"jobs run here(?s:.*)--pid {other.pid}  1 rank: "):
        choose_job(None)
    with pytest.raises(JobError, match="process 1 "):  # it is another user's, or no rank
        choose_job(1)
    with pytest.raises(JobError, match="there is no process 99999999 here"):
        choose_job(99999999)
    monkeypatch.setattr(job_finder, "find_jobs", list)
    with pytest.raises(JobError, match=r"no job of user \S+ runs on host"):
        choose_job(None)


def test_a_process_of_another_user_is_refused_by_name(made, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    with pytest.raises(JobError, match=rf"process {os.getppid()} belongs to user \S+, and only "):
        choose_job(os.getppid())


def test_what_another_user_started_is_told_where_nothing_is_found(monkeypatch):
    monkeypatch.setattr(job_finder, "find_jobs", list)
    monkeypatch.setattr(job_finder, "launching_users", lambda: {"mallory"})
    with pytest.raises(JobError, match="processes of mpirun of mallory, who alone can look into theirs"):
        choose_job(None)
    assert isinstance(launching_users(), set)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_kernel_lets_nobody_else_in(made):
    job(made, 83, [os.getpid()])
    path = f"/proc/{os.getpid()}/fd/{made[0]._segment._fd}"
    assert os.readlink(path) == job_finder.LINK
    child = os.fork()
    if child == 0:  # no more than this: it is a copy of a process with threads
        code = 1
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            found_none = found(83) is None
            os.open(path, os.O_RDWR)
        except PermissionError:
            code = 0 if found_none else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_ends_meanwhile_is_passed_over(tmp_path):
    assert job_finder._descriptors(tmp_path / "1234") == []


HOSTILE_TEXTS = [
    pickle.dumps([RankState(0)]),
    b"",
    b"[",
    b"[" * 100_000,
    b"9" * 100_000,
    b"null",
    b"[null]",
    b'{"rank": 0}',
    b"[[]]",
    b'[{"rank": 0, "host": 5}]',
    b'[{"rank": "0"}]',
    b'[{"rank": true}]',
    b'[{"rank": 1e300}]',
    b'[{"rank": 123456789012345678901234567890}]',
    b'[{"host": "no rank"}]',
    b'[{"rank": 0, "__class__": "os"}]',
    b'[{"rank": 0, "waits": [{"what": "x", "message": ["group", true, [0]]}]}]',
    b'[{"rank": 0, "waits": [5]}]',
    b'[{"rank": 0, "stacks": {"main": null}}]',
    b'[{"rank": 0, "stacks": []}]',
    b'[{"rank": 0, "num_begun": {"a": "b"}}]',
    b'[{"rank": 0}, {"rank": 1}]',
    b"\xff\xfe\x00",
]


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize("text", [None, *HOSTILE_TEXTS], ids=range(len(HOSTILE_TEXTS) + 1))
def test_what_a_process_in_a_sandbox_offers_is_not_unpickled_nor_believed(made, tmp_path, monkeypatch, text):
    """A process of the same user has memory of the same name: `top` unpickled what lay there."""
    monkeypatch.setattr(job_finder, "ANSWER_S", 0.05)
    (box,) = job(made, 85, [os.getpid()], answering=True)
    trace = tmp_path / "unpickled"
    seen = found(85)
    assert seen is not None
    monkeypatch.setattr(MailboxPages, "ask", lambda self, ranks: 0)  # what lies there counts as the answer
    box.answer(1, pickle.dumps([Trap(str(trace))]) if text is None else text)
    (state,) = seen.states("here")
    assert (state.rank, state.pid) == (0, os.getpid())
    assert state.state != RUNS
    assert not trace.exists()


def test_no_escape_sequence_of_a_state_reaches_the_terminal(made, monkeypatch):
    (box,) = job(made, 86, [os.getpid()], answering=True)
    seen = found(86)
    assert seen is not None
    monkeypatch.setattr(MailboxPages, "ask", lambda self, ranks: 0)
    box.answer(1, json.dumps([{"rank": 0, "note": "\x1b]0;title\x07", "state": "\x1b[2J"}]).encode())
    (state,) = seen.states("here")
    assert (state.note, state.state) == ("\\x1b]0;title\\x07", "\\x1b[2J")


def test_a_process_cannot_say_that_another_one_is_its_rank(made, other):
    segment = Segment(create(SHARE_BYTES, MAILBOX_NAME), SHARE_BYTES, 1)
    box = ShmMailbox(segment, range(1), 0)
    made.append(box)
    for pid in (other.pid, 1, 2**63, 0):
        box.introduce(Introduction(0, 1, 87, ProcessIdentity(pid, 0, -1), True))
        assert other.pid not in [pid for job in _jobs() for pid in job.pids]
        assert found_quietly(87) is None or pid not in (other.pid, 1)


def _jobs() -> list[FoundJob]:
    with contextlib.suppress(JobError):
        return find_jobs()
    return []


def found_quietly(number: int) -> FoundJob | None:
    jobs = {member.who.job: job for job in _jobs() for member in job.members.values()}
    return jobs.get(number)


@pytest.mark.parametrize("nbytes", [0, 100, job_finder.MAX_RANKS * SHARE_BYTES + SHARE_BYTES])
def test_memory_that_is_no_mailboxes_is_left_alone(nbytes):
    """One that can shrink would end `top` by a signal while it looks; a large one would keep it busy."""
    unsealed = os.memfd_create(MAILBOX_NAME)
    os.ftruncate(unsealed, nbytes or SHARE_BYTES)
    fds = [unsealed, create(nbytes, MAILBOX_NAME)]
    try:
        files = [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in fds]
        with contextlib.suppress(JobError):
            find_jobs()
        assert not any(job_finder._is_mailbox(fd, file) for fd, file in zip(fds, files, strict=True))
    finally:
        for fd in fds:
            os.close(fd)
