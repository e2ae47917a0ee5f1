"""Start a job's RPC, store and `top` many times with strangers at work; count those that came in.

Strangers of another user (where this one is root) and of the same user in a sandbox (a user namespace of its
own) watch for ports from before they open, and speak the protocols of torch's RPC and store.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SANDBOX = ("unshare", "--user", "--map-current-user")
KINDS = ("rpc", "store", "top")
END_S = 30.0
NEW_NETWORK, NEW_USERS = 0x40000000, 0x10000000  # of unshare(2)
SET_FLAGS, IS_UP = 0x8914, 1  # of an interface

__all__ = ["Outcome", "obstacles", "run"]


class Outcome(NamedTuple):
    """What became of the attempts.

    Attributes:
        counts: of (kind, what became of it): refused, got in, saw nothing.
        left: files that strangers' calls have left.
        code: the job's exit code.
        said: by the job.
        took_s: all in all.
    """

    counts: Counter[tuple[str, str]]
    left: list[str]
    code: int
    said: str
    took_s: float

    @property
    def num_in(self) -> int:
        """How many attempts came in."""
        return sum(count for (_, what), count in self.counts.items() if what == "got in")


def obstacles() -> dict[str, str]:
    """Which strangers cannot be had here, and why."""
    found = {}
    change = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)"
    if subprocess.run([sys.executable, "-S", "-c", change], capture_output=True).returncode:
        found["other"] = "only root can start processes of another user"
    if not shutil.which(SANDBOX[0]) or subprocess.run([*SANDBOX, "true"], capture_output=True).returncode:
        found["sandbox"] = "this system allows no user namespaces"
    return found


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


def strangers(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """The kinds and names of those that can be had; `top` looks at processes of its own user only."""
    missing = obstacles()
    users = [user for user in ("other", "sandbox") if user not in missing]
    return [(kind, f"{user}-{kind}") for kind in kinds for user in users if (kind, user) != ("top", "other")]


def run(folder: Path, starts: int, *, kinds: tuple[str, ...] = KINDS, num_ranks: int = 2) -> Outcome:
    """Run a job that starts `starts` times, with a stranger of each user and kind."""
    folder.chmod(0o777)
    began_s, who = time.monotonic(), strangers(kinds)
    env = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    processes = []
    for kind, name in who:
        prefix = SANDBOX if name.startswith("sandbox") else ()
        command = [*prefix, sys.executable, str(HERE / f"stranger_{kind}.py"), str(folder), name, str(starts)]
        with (folder / f"{name}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
    beside = Path(sys.executable).with_name("mpirun")
    command = [str(beside) if beside.exists() else "mpirun", "-n", str(num_ranks), sys.executable]
    command += [
        str(HERE / "stranger_jobs.py"),
        str(folder),
        str(starts),
        *(f"{kind}:{name}" for kind, name in who),
    ]
    try:
        job = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # where the job has ended early
                process.wait(END_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name in who:
        for what in ("refused", "got in", "saw nothing"):
            counts[kind, what] += len([*folder.glob(f"{name} {what} {kind} *")])
    left = [path.name for mark in ("pickled", "operator", "unpickled") for path in folder.glob(f"*-{mark}")]
    return Outcome(counts, left, job.returncode, job.stdout, time.monotonic() - began_s)


def main() -> int:
    """Run it and print the counts; the exit code is 1 where anybody came in."""
    parser = argparse.ArgumentParser(prog="scripts/strangers", description=__doc__)
    parser.add_argument("--starts", type=int, default=500, help="of RPC, of the store and of `top` each")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    leave_the_network()
    for user, why in obstacles().items():
        print(f"no stranger '{user}': {why}")
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options.starts, num_ranks=options.ranks)
    for (kind, what), count in sorted(outcome.counts.items()):
        print(f"{kind:6} {what:12} {count}")
    print(f"{outcome.num_in} of {options.starts} starts let a stranger in; {outcome.took_s:.0f} s")
    if outcome.code:
        print(outcome.said[-4000:])
    return int(bool(outcome.num_in or outcome.left or outcome.code))


if __name__ == "__main__":
    sys.exit(main())
