"""A job that is looked at from outside: its processes, what they listen on, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# More ranks than cores, and root in a container; and nothing that someone has measured on this machine.
ENVIRONMENT = {
    "MPISGD_PROFILE": "built-in",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
QUIET_S = 120.0  # a job that says nothing for so long hangs
LISTENS = "0A"  # in /proc/net/tcp
ANY_ADDRESS = {"00000000", "0" * 32}
ENDED = "Z"


def mpirun() -> str:
    """The launcher installed beside this Python, else the first on the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this Python or on the PATH"
    return found


class Job:
    """A program under `mpirun`, whose ranks print `pid N` when they have begun.

    Attributes:
        launcher: the process id of `mpirun`.
        ranks: the process ids of the ranks, in no order.
        lines: what they have printed, as it comes.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        whole = [*(prefix or [mpirun(), "-n", str(num_ranks), *options]), *command]
        self.process = subprocess.Popen(
            whole,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.launcher = self.process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.ranks: list[int] = []
        self.wait_for("pid ", num_ranks)
        self.ranks = [int(line.split()[1]) for line in self.lines if line.startswith("pid ")]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, start: str, count: int = 1) -> None:
        """Return when `count` lines with this beginning have come."""
        said, since = 0, time.monotonic()
        while sum(line.startswith(start) for line in list(self.lines)) < count:
            if len(self.lines) != said:
                said, since = len(self.lines), time.monotonic()
            if time.monotonic() - since > QUIET_S or (
                self.process.poll() is not None and not self._reader.is_alive()
            ):
                raise AssertionError(f"{count} times {start!r} did not come:\n{self.output}")
            time.sleep(0.01)

    def kill(self, *pids: int, sign: int = signal.SIGKILL) -> None:
        """Send a signal to some of the job's processes."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)

    def wait(self, limit_s: float = 90.0) -> int:
        """Return the launcher's exit code, when all ranks have ended too."""
        code = self.process.wait(limit_s)
        deadline = time.monotonic() + limit_s
        while left := [pid for pid in self.ranks if is_alive(pid)]:
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks that do not end: {left}\n{self.output}")
            time.sleep(0.05)
        self._reader.join(5)
        return code

    def end(self) -> None:
        """See to it that nothing is left running."""
        self.kill(self.launcher, *self.ranks, sign=signal.SIGKILL)
        self.kill(self.launcher, *self.ranks, sign=signal.SIGCONT)
        self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def running(command: Sequence[str], num_ranks: int, **options: object) -> Iterator[Job]:
    """A job that is ended at the end of the block, whatever happens in it."""
    job = Job(command, num_ranks, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        job.end()


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != ENDED


def descendants(pid: int) -> list[int]:
    """The process and all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def listens_on(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, that a process listens on."""
    listening: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                listening[fields[9]] = fields[1].partition(":")[0]
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            if match and match[1] in listening:
                found.append(listening[match[1]])
    return found


def mapped(pid: int, folder: str) -> set[str]:
    """The names of files of a folder that a process has mapped, also of those that have no name any more."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[5].startswith(folder):
            found.add(Path(fields[5].removesuffix(" (deleted)")).name)
    return found


def modes_of_open_files(pid: int, folders: Sequence[str]) -> dict[str, int]:
    """Files of these folders, and those without a name, that a process has open, with their modes."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith((*folders, "/memfd:")):
                found[target] = os.stat(entry).st_mode & 0o777
    return found
