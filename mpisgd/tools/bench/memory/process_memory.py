"""How much memory the processes of a host take together, with what they share counted once.

    private   what no file backs, such as tensors                              added up
    shared    shared memory, in which a page of n processes counts 1/n each    added up
    files     mapped files, mostly the code of libraries                       the largest of the processes

The kernel's proportional share (PSS) divides files, too, but among all programs on the host: any other one
that uses torch would change it. Processes of one job map the same libraries, so the largest is what a host
has for them that does nothing else.

psutil gives the sum of the three only, so this reads the kernel's own files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessMemory", "estimate", "read_memory", "together"]

KIB = 1024


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of one process, or of several together."""

    private: int = 0
    shared: int = 0
    files: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.private + self.shared + self.files


def together(shares: Iterable[ProcessMemory]) -> ProcessMemory:
    """Return the memory of processes of one host together, in bytes."""
    shares = list(shares)
    return ProcessMemory(
        sum(share.private for share in shares),
        sum(share.shared for share in shares),
        max((share.files for share in shares), default=0),
    )


def read_memory(pid: int | str = "self") -> ProcessMemory | None:
    """Return the memory of a process now; None where it has ended.

    Cost: the kernel walks all of the process's pages: 20 ms for a gigabyte.
    """
    pss, rss = _fields(f"/proc/{pid}/smaps_rollup"), _fields(f"/proc/{pid}/status")
    if "Pss_Anon" not in pss or "RssFile" not in rss:
        return None
    return ProcessMemory(pss["Pss_Anon"], pss["Pss_Shmem"], rss["RssFile"])


def estimate(pid: int | str, sharers: int) -> int:
    """Return about how much a process takes without files, from counters; 0 where it has ended.

    Args:
        pid: of the process.
        sharers: how many processes share all shared memory.
    """
    rss = _fields(f"/proc/{pid}/status")
    return rss.get("RssAnon", 0) + rss.get("RssShmem", 0) // sharers


def _fields(file: str) -> dict[str, int]:
    """Return the lines `Name:  123 kB` of a file, in bytes; none where the process has ended."""
    try:
        lines = Path(file).read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(value) * KIB for name, value, _ in words}
