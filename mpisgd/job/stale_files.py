"""`remove_stale_files`: removes what killed jobs leave behind on a host, and what this one would.

Open MPI's ranks of one host share files in /dev/shm, and its launcher has a folder in the temporary folder.
They remove both themselves, but not when everything is killed at once. So:

- A file that all ranks of the host have mapped needs its name no more. It is unlinked at the start; the
  memory is freed when the last rank ends, however it ends.
- The launcher's folder is needed to the end. A rank marks it as belonging to this launcher on this machine,
  and later jobs of the same user remove folders whose launcher is gone.
"""

import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.monitor.process_inspector import start_ticks

__all__ = ["mapped_segments", "mark", "remove_stale_files", "sweep"]

SHARED_MEMORY = Path("/dev/shm")
SEGMENT = "sm_segment."  # of Open MPI's shared memory transport
FOLDER = "ompi."  # of Open MPI's launcher, followed by its process id
FOLDER_VARIABLE = "PMIX_SERVER_TMPDIR"
MARK = "mpisgd-launcher"


def remove_stale_files(communicator: GroupCommunicator) -> None:
    """Remove the files of killed jobs of this user, and those of this one that need no name. Collective."""
    local = communicator.same_host()
    mapped = set.intersection(*local.all_gather_object(mapped_segments()))
    local.free()
    if local.rank != 0:
        return
    for path in mapped:
        with contextlib.suppress(OSError):
            os.unlink(path)
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if folder.name.startswith(FOLDER):
        mark(folder)
        sweep(folder.parent)


def mapped_segments() -> set[str]:
    """Return the files of Open MPI's transport that this process has mapped and that still have a name."""
    # psutil reads smaps, for which the kernel walks all of the process's pages: 20 ms for a gigabyte.
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    paths = re.findall(rf"(?<= ){SHARED_MEMORY}/{re.escape(SEGMENT)}.*", maps)
    return {path for path in paths if not path.endswith(" (deleted)")}


def mark(folder: Path) -> None:
    """Write into a launcher's folder whose it is; nothing if that is not possible.

    Other jobs may read it at any moment, so the mark is there as a whole or not at all.
    """
    pid = folder.name.removeprefix(FOLDER)
    draft = folder / f"{MARK}.{os.getpid()}"
    with contextlib.suppress(OSError):
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{_machine()}\n{_start_of(pid)}\n")
        draft.replace(folder / MARK)


def sweep(parent: Path) -> None:
    """Remove the marked folders in `parent` whose launcher is gone."""
    for folder in parent.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether the launcher that a mark names has ended: one of this machine, that is."""
    machine, _, start = (folder / MARK).read_text(errors="replace").partition("\n")
    whole = start.endswith("\n")  # what is not was being written when its job was killed, or is none of ours
    return whole and machine == _machine() and start.strip() != _start_of(folder.name.removeprefix(FOLDER))


def _machine() -> str:
    """Return an id of this boot and this container, within which process ids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: str) -> str:
    """Return when the process was started, in the kernel's ticks; empty if there is none."""
    ticks = start_ticks(int(pid)) if pid.isdecimal() else 0
    return str(ticks) if ticks else ""
