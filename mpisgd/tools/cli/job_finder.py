"""The jobs of this user that run on this host, as a process sees them that is no part of them.

Each rank keeps the file of its host's mailboxes open. It has a name only in /proc, where the kernel shows it,
and opens it, to the user whose process it is and to nobody else; nothing is left when the ranks end. Whoever
has opened it asks the ranks as they ask each other. A rank that does not answer is described from outside.

Any process of the same user can have such a file, also one in a sandbox that this one is not in. So nothing
that is read there is believed beyond what it says of its own processes: see `Mailboxes` and `decode`.
"""

import contextlib
import fcntl
import mmap
import os
import pwd
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

from mpisgd.arguments import printable
from mpisgd.errors import JobError
from mpisgd.monitor import process_inspector
from mpisgd.monitor.mailbox_pages import MAILBOX_NAME, SHARE_BYTES, Introduction, MailboxPages, Steps
from mpisgd.monitor.rank_state import LEFT, RUNS, RankState, decode

__all__ = ["FoundJob", "Member", "choose_job", "describe", "find_jobs", "launching_users"]

PROC = Path("/proc")
LINK = f"/memfd:{MAILBOX_NAME} (deleted)"
ANSWER_S = 1.0
SURE_S = 0.2  # whom the kernel then says to be stopped or gone will not answer
POLL_S = 0.005
MAX_RANKS = 4096  # of a host
MAX_PID = 2**22  # of Linux
LAUNCHERS = {"mpirun", "mpiexec", "prterun", "prted", "orted", "mpiexec.hydra", "hydra_pmi_proxy"}


class Member(NamedTuple):
    """A rank of a job on this host: who it is, and its mailbox."""

    who: Introduction
    pages: MailboxPages
    place: int

    @property
    def steps(self) -> Steps:
        """How far its program is."""
        return self.pages.steps(self.place)


class FoundJob:
    """A job of which some ranks run on this host.

    Attributes:
        members: those ranks, by their global rank.
        size: of the whole job.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = {member.who.rank: member for member in sorted(members, key=lambda each: each.who.rank)}
        self.size = next(iter(self.members.values())).who.size

    @property
    def pids(self) -> list[int]:
        """The processes of its ranks here, by rank."""
        return [member.who.process.pid for member in self.members.values()]

    @property
    def is_over(self) -> bool:
        """Whether no rank is left."""
        return all(_is_over(member) for member in self.members.values())

    def states(self, host: str = "") -> list[RankState]:
        """Return the states of the ranks, in their order; within milliseconds where they answer.

        Args:
            host: what those are said to be on that do not answer.
        """
        began_s = time.monotonic()
        stamps = {rank: member.pages.ask([member.place]) for rank, member in self.members.items()}
        found: dict[int, RankState] = {}
        while True:
            for rank, stamp in stamps.items():
                if rank not in found and (state := _told_by(self.members[rank], stamp)) is not None:
                    found[rank] = state
            waited_s = time.monotonic() - began_s
            silent = [member.who.process for rank, member in self.members.items() if rank not in found]
            will_not_answer = waited_s > SURE_S and all(map(process_inspector.is_stopped_or_gone, silent))
            if not silent or waited_s > ANSWER_S or will_not_answer:
                break
            time.sleep(POLL_S)
        return [
            found.get(rank) or process_inspector.inspect(rank, host, member.who.process, waited_s, deep=False)
            for rank, member in self.members.items()
        ]


def _told_by(member: Member, stamp: int) -> RankState | None:
    """Return the state that a rank has sent itself; None as long as it may still answer."""
    rank, _, _, process, is_answering = member.who
    if member.pages.has_left(member.place):
        return RankState(rank, pid=process.pid, state=LEFT)
    if not is_answering and not process_inspector.is_stopped_or_gone(process):
        return RankState(rank, pid=process.pid, state=RUNS)
    text = member.pages.answer_from(member.place, stamp)
    with contextlib.suppress(ValueError):  # no state: it does not answer, then
        (state,) = decode(text or b"")
        if state.rank == rank:
            return state
    return None


def _is_over(member: Member) -> bool:
    return member.pages.has_left(member.place) or process_inspector.is_gone(member.who.process)


def find_jobs() -> list[FoundJob]:
    """Return the jobs of this process's user that run on this host.

    Raises:
        JobError: one is of another version of mpisgd, and there is no other.
    """
    by_job: dict[int, list[Member]] = defaultdict(list)
    others = 0
    for memory, holders in _mailboxes():
        pages = MailboxPages(memory, range(len(memory) // SHARE_BYTES))
        for place in pages.ranks:
            who = pages.introduction(place)
            if who is None or not _is_its_own(Member(who, pages, place), holders):
                others += 1
            else:
                by_job[who.job].append(Member(who, pages, place))
    jobs = [job for job in map(FoundJob, by_job.values()) if not job.is_over]
    if others and not jobs:
        raise JobError(
            "a job runs here that does not say who it is: it starts, or has another mpisgd version"
        )
    return jobs


def _is_its_own(member: Member, holders: Set[int]) -> bool:
    """Return whether the rank of a mailbox is a process that has the file open, or is none any more."""
    pid = member.who.process.pid
    return pid in holders or (0 < pid <= MAX_PID and _is_over(member))


class Mailboxes(NamedTuple):
    """Memory of mailboxes, and the processes that have it open: nobody else can be a rank in it."""

    memory: mmap.mmap
    holders: set[int]


def _mailboxes() -> Iterator[Mailboxes]:
    """Return the memory of each host's mailboxes; several processes have the same file open."""
    paths: dict[tuple[int, int], Path] = {}
    holders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for process in _processes(os.getuid()):
        for path in _descriptors(process):
            with contextlib.suppress(OSError):
                if os.readlink(path) == LINK:
                    file = _identity(path)
                    paths[file] = path
                    holders[file].add(int(process.name))
    for file, path in paths.items():
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDWR)
            try:
                if _is_mailbox(fd, file):
                    yield Mailboxes(mmap.mmap(fd, os.fstat(fd).st_size), holders[file])
            finally:
                os.close(fd)


def _is_mailbox(fd: int, file: tuple[int, int]) -> bool:
    """Return whether it is this user's, and memory that cannot shrink while it is looked at."""
    status = os.fstat(fd)
    return (
        (status.st_dev, status.st_ino) == file
        and status.st_uid == os.getuid()
        and status.st_size in range(SHARE_BYTES, MAX_RANKS * SHARE_BYTES + 1, SHARE_BYTES)
        and bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    )


def _processes(uid: int | None) -> Iterator[Path]:
    """Return the processes of a user; None: of everybody."""
    for entry in PROC.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and uid in (None, entry.stat().st_uid):
                yield entry


def _descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:  # it has ended, or has more rights than this one
        return []


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


# -- which one is meant ------------------------------------------------------------------------------------


def choose_job(pid: int | None) -> FoundJob:
    """Return the job that a process belongs to; None: the only one there is.

    Raises:
        JobError: there is none, or there are several; in words for the user.
    """
    if pid is not None:
        _check_owner(pid)
    jobs = find_jobs()
    if pid is not None:
        jobs = [job for job in jobs if pid in job.pids]
        if not jobs:
            raise JobError(f"process {pid} is no rank of a job here, or has not returned from mpisgd.init()")
    if not jobs:
        raise JobError(_nothing_found())
    if len(jobs) > 1:
        listed = "".join(f"\n  --pid {job.pids[0]}  {describe(job)}" for job in jobs)
        raise JobError(f"{len(jobs)} jobs run here; choose one by a process of it:{listed}")
    return jobs[0]


def describe(job: FoundJob) -> str:
    """Return how many ranks a job has, and how many of them here, and the command of the first one."""
    here, size = len(job.members), job.size
    ranks = f"{size} rank{'s' * (size != 1)}"
    return f"{ranks if here == size else f'{here} of {ranks} here'}: {_command(job)}"


def _command(job: FoundJob) -> str:
    for pid in job.pids:
        with contextlib.suppress(OSError):
            words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            return printable(" ".join(words).strip())
    return "?"


def _check_owner(pid: int) -> None:
    try:
        uid = (PROC / str(pid)).stat().st_uid
    except OSError:
        raise JobError(f"there is no process {pid} here") from None
    if uid != os.getuid():
        owner = _user(uid)
        raise JobError(f"process {pid} belongs to user {owner}, and only {owner} can look into its job")


def _nothing_found() -> str:
    me = _user(os.getuid())
    text = f"no job of user {me} runs on host {os.uname().nodename}"
    others = launching_users() - {me}
    if others:
        text += (
            f"; there are processes of mpirun of {', '.join(sorted(others))}, who alone can look into theirs"
        )
    return f"{text} (a job is found once mpisgd.init() has returned)"


def launching_users() -> set[str]:
    """Return the users who have processes of an MPI launcher here: what everybody can see."""
    found = set()
    for process in _processes(None):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().strip() in LAUNCHERS:
                found.add(_user(process.stat().st_uid))
    return found


def _user(uid: int) -> str:
    """Return a user's name; the number where nobody knows it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
