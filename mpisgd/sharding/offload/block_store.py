"""`BlockStore`: memory outside of memory, of which blocks are read and written where they are.

`PrivateFile` is one, in a file. Whatever else has these calls can take its place: `BlockCache`, which has
some blocks in memory, and `FileStore`, which has the state of pieces in blocks, know nothing else of it.
"""

from typing import Protocol

__all__ = ["BlockStore"]


class BlockStore(Protocol):
    """Bytes that this rank alone reads and writes. All calls but the properties' raise `OffloadError`.

    Several threads read and write at a time, at different places.

    Attributes:
        size: how many bytes there are.
    """

    size: int

    @property
    def described(self) -> str:
        """What is in it and where it is, for messages."""

    def allocate(self, nbytes: int) -> int:
        """Make room at the end; return where it begins. What is full is noticed here, and not by a write."""

    def truncate(self, size: int) -> None:
        """Give all room back but the first `size` bytes."""

    def write(self, memory: memoryview, start: int) -> None:
        """Write all of `memory`, from a byte on."""

    def read(self, memory: memoryview, start: int) -> None:
        """Fill all of `memory`, from a byte on."""

    def descriptor(self) -> int:
        """Return a descriptor of a file with the same bytes."""
