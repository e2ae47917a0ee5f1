"""A stranger that offers memory as a job's mailboxes: whoever looks for jobs finds pickles that leave a file.

python scripts/security/stranger_top.py FOLDER NAME STARTS
"""

import os
import pickle
import sys
from pathlib import Path

from stranger_meeting import announce, await_all

from mpisgd.monitor.mailbox_pages import ANSWER, MAILBOX_NAME, SHARE_BYTES, Introduction
from mpisgd.monitor.process_inspector import ProcessIdentity, start_ticks
from mpisgd.monitor.shm_mailbox import ShmMailbox
from mpisgd.transport.ipc.memfd import create
from mpisgd.transport.ipc.segment import Segment

NEWEST = 2**63  # answers whatever is asked


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def main() -> None:
    """Offer it, as often as somebody looks."""
    folder, name, starts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    box = ShmMailbox(Segment(create(SHARE_BYTES, MAILBOX_NAME), SHARE_BYTES, 1), range(1), 0)
    me = ProcessIdentity(os.getpid(), start_ticks(os.getpid()), -1)
    for start in range(starts):
        box._write(ANSWER, NEWEST, pickle.dumps([Trap(folder / f"{name}-top-{start}-unpickled")]))
        box.introduce(Introduction(0, 1, 12345, me, True))
        announce(folder, f"{name} ready top {start} start")
        announce(folder, f"{name} watches top {start}")
        await_all(folder, [f"done top {start}"])
        got_in = (folder / f"{name}-top-{start}-unpickled").exists()
        announce(folder, f"{name} {'got in' if got_in else 'refused'} top {start} start")


if __name__ == "__main__":
    main()
