"""Start a job's RPC, store and `top` many times with strangers at work; count those that came in.

Strangers of another user (where this one is root) and of the same user in a sandbox (a user namespace of its
own) watch for ports from before they open, and speak the protocols of torch's RPC and store: when the ports
open, while the job runs and while it ends. A start that fails, which strangers can bring about, is counted.
"""

import argparse
import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from stranger_meeting import OUTCOMES, OVER, PHASES

from mpisgd.tools.bench.jobs import mpirun

HERE = Path(__file__).resolve().parent
SANDBOX = ("unshare", "--user", "--map-current-user")
KINDS = ("store", "rpc", "top")  # in the order of stranger_jobs.py
END_S = 20.0  # within which strangers must have seen that the job is over
MOST_FAILURES = 5
LOG_CHARACTERS = 4000
NEW_NETWORK, NEW_USERS = 0x40000000, 0x10000000  # of unshare(2)
SET_FLAGS, IS_UP = 0x8914, 1  # of an interface


class Outcome(NamedTuple):
    """What became of the attempts.

    Attributes:
        counts: of (kind, phase, what became of it).
        left: files that strangers' calls have left.
        num_done: how many starts were whole.
        num_failed: how many failed; more than MOST_FAILURES end the run.
        logs: of strangers that went wrong.
        missing: strangers that could not be had, and why.
        took_s: all in all.
    """

    counts: Counter[tuple[str, str, str]]
    left: list[str]
    num_done: int
    num_failed: int
    logs: list[str]
    missing: dict[str, str]
    took_s: float

    @property
    def num_in(self) -> int:
        """How many attempts came in."""
        return sum(count for (_, _, what), count in self.counts.items() if what == "got in")


def obstacles(folder: Path) -> dict[str, str]:
    """Which strangers cannot be had here, and why; `folder` is where they would write."""
    found = {}
    become = "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    if _fails(sys.executable, "-S", "-c", become):
        found["other"] = "only root can start processes of another user"
    elif _fails(
        sys.executable, "-c", f"{become}open(sys.argv[1]); open(sys.argv[2], 'w')", __file__, folder / "-"
    ):
        found["other"] = f"another user cannot read {HERE}, or not write to {folder}"
    if not shutil.which(SANDBOX[0]) or _fails(*SANDBOX, "true"):
        found["sandbox"] = "this system allows no user namespaces"
    return found


def _fails(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True).returncode != 0


def folder_of_all() -> str:
    """Return a folder for temporary files that all users can come to."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path("/var/tmp")]
    wanted = stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH
    return str(next((f for f in folders if f.exists() and f.stat().st_mode & wanted == wanted), folders[0]))


def leave_the_network() -> None:
    """Go into a network of this process's own, with nothing but loopback: strangers attack what they see.

    Raises:
        OSError: this system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NETWORK) != 0 and libc.unshare(NEW_NETWORK | NEW_USERS) != 0:
        raise OSError(ctypes.get_errno(), "no network namespaces here: be root, or allow user namespaces")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))


def strangers(kinds: Iterable[str], missing: Container[str]) -> list[tuple[str, str]]:
    """The kinds and names of those that can be had; `top` looks at processes of its own user only."""
    users = [user for user in ("other", "sandbox") if user not in missing]
    return [(kind, f"{user}-{kind}") for kind in kinds for user in users if (kind, user) != ("top", "other")]


def run(folder: Path, starts: int, *, kinds: tuple[str, ...] = KINDS, num_ranks: int = 2) -> Outcome:
    """Run a job that starts `starts` times, with a stranger of each user and kind."""
    folder.chmod(0o777)
    began_s, missing = time.monotonic(), obstacles(folder)
    who = strangers(kinds, missing)
    env = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    processes, num_failed, first = {}, 0, 0
    for kind, name in who:
        prefix = SANDBOX if name.startswith("sandbox") else ()
        command = [*prefix, sys.executable, str(HERE / f"stranger_{kind}.py"), str(folder), name, str(starts)]
        with (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    launch = [*mpirun(), "-n", str(num_ranks), sys.executable]
    names = [f"{kind}:{name}" for kind, name in who]
    try:
        while first < starts and num_failed <= MOST_FAILURES:
            command = [*launch, str(HERE / "stranger_jobs.py"), str(folder), str(first), str(starts), *names]
            job = subprocess.run(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if not job.returncode:
                break
            num_failed += 1
            first = pass_over(folder, first, kinds)
            print(f"start {first - 1} failed:\n{job.stdout[-LOG_CHARACTERS:]}", flush=True)
        (folder / OVER).touch()
        deadline = time.monotonic() + END_S
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    counts: Counter[tuple[str, str, str]] = Counter()
    for (kind, name), phase, what in itertools.product(who, PHASES, OUTCOMES):
        counts[kind, phase, what] += len([*folder.glob(f"{name} {what} {kind} * {phase}")])
    left = [
        path.name
        for mark in ("pickled", "operator", "unpickled", "written")
        for path in folder.glob(f"*-{mark}")
    ]
    logs = [(folder / f"{name}.log").read_text() for name, each in processes.items() if each.returncode]
    num_done = len([*folder.glob(f"done {kinds[-1]} *")]) - num_failed
    return Outcome(counts, left, num_done, num_failed, logs, missing, time.monotonic() - began_s)


def pass_over(folder: Path, first: int, kinds: Iterable[str]) -> int:
    """Say of a start that failed that it is over; return the next one."""
    start = next(k for k in itertools.count(first) if any(not _done(folder, kind, k) for kind in kinds))
    for kind in kinds:
        said = ("next {}", "opened {}", "{} start", "{} run", "{} end", "done {}")
        for what in (text.format(f"{kind} {start}") for text in said):
            (folder / what).touch()
    return start + 1


def _done(folder: Path, kind: str, start: int) -> bool:
    return (folder / f"done {kind} {start}").exists()


def main() -> int:
    """Run it and print the counts; the exit code is 1 where anybody came in or fewer starts were whole."""
    parser = argparse.ArgumentParser(prog="scripts/strangers", description=__doc__)
    parser.add_argument("--starts", type=int, default=500, help="of RPC, of the store and of `top` each")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    leave_the_network()
    with tempfile.TemporaryDirectory(dir=folder_of_all()) as folder:
        outcome = run(Path(folder), options.starts, num_ranks=options.ranks)
    for user, why in outcome.missing.items():
        print(f"no stranger '{user}': {why}")
    for (kind, phase, what), count in sorted(outcome.counts.items()):
        if count or what == "got in":
            print(f"{kind:6} {phase:6} {what:12} {count}")
    for said in outcome.logs:
        print(said[-LOG_CHARACTERS:])
    print(f"{outcome.num_failed} starts failed")
    print(f"{outcome.num_in} of {outcome.num_done} starts let a stranger in; {outcome.took_s:.0f} s")
    whole = outcome.num_done + outcome.num_failed == options.starts
    return int(bool(outcome.num_in or outcome.left or not whole or outcome.num_failed > MOST_FAILURES))


if __name__ == "__main__":
    sys.exit(main())
