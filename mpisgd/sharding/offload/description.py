"""`Offload`: what of a training lies outside the memory in which it computes, and where."""

import hashlib
import os
import sys
from dataclasses import dataclass

from mpisgd.arguments import as_path, check_positive, check_text, shown
from mpisgd.errors import InvalidArgument

__all__ = ["CRC32", "Offload"]

MODES = ("auto", "direct", "buffered")
CRC32 = "crc32"
WHAT = ("optimizer", "parameters")
LEAST_BLOCK_BYTES = 4096
CHUNKS_PER_BLOCK = 4  # so that a block has room for all that an optimizer keeps of a piece


@dataclass(frozen=True)
class Offload:
    """State in files of a folder, read before it is used and written back afterwards (ZeRO-Infinity).

    Without a folder, the optimizer state of a model on a GPU is kept in host memory (ZeRO-Offload). For a
    model on a GPU, with a folder or without, the optimizer updates copies of the parameters in host memory,
    on the CPU.

    The buffers for files take `2 * (prefetch + 1) * block_bytes` on each rank, for a model of any size. The
    files are private to the user and have no name, so that nothing of them remains after the job, however it
    ends. Their format is safetensors.

    Args:
        folder: on a disk of each host, preferably a local one. It may also contain checkpoints. None: state
            is in host memory, and the other arguments have no effect.
        what: `"optimizer"`, or `"optimizer,parameters"` for models whose parameters do not fit into memory,
            either: see `mpisgd.offload_parameters`.
        prefetch: number of blocks that are read ahead, and number of blocks that may wait to be written.
        block_bytes: size of a block, which is read or written at once.
        io: `"direct"` bypasses the page cache of the kernel, `"buffered"` uses it, `"auto"` takes the faster
            one, by a short measurement in the folder.
        checksum: checksum of each block, compared when it is read: None, `"crc32"`, or a name that `hashlib`
            knows.

    Raises:
        InvalidArgument: an invalid argument.

    Source: Rajbhandari et al. 2021, ZeRO-Infinity, section 6; Ren et al. 2021, ZeRO-Offload.
    """

    folder: str | os.PathLike[str] | None = None
    what: str = "optimizer"
    prefetch: int = 2
    block_bytes: int = 8 * 2**20
    io: str = "auto"
    checksum: str | None = None

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", str(as_path("Offload", "folder", self.folder)))
        self._check_what()
        check_positive("Offload", "prefetch", self.prefetch, whole=True)
        check_positive("Offload", "block_bytes", self.block_bytes, whole=True)
        if self.block_bytes < LEAST_BLOCK_BYTES:
            raise InvalidArgument(
                f"Offload: block_bytes={self.block_bytes}; expected {LEAST_BLOCK_BYTES} or more"
            )
        if self.io not in MODES:
            raise InvalidArgument(f"Offload: io={shown(self.io)}; expected one of {', '.join(MODES)}")
        if self.checksum is not None:
            self._check_checksum(self.checksum)

    def _check_what(self) -> None:
        check_text("Offload", "what", self.what)
        if "optimizer" not in self.parts or not self.parts <= set(WHAT):
            raise InvalidArgument(
                f"Offload: what={shown(self.what)}; expected 'optimizer' or 'optimizer,parameters'"
            )
        if "parameters" in self.parts and self.folder is None:
            raise InvalidArgument(f"Offload: what={shown(self.what)}; parameters are in files: name a folder")

    @staticmethod
    def _check_checksum(name: str) -> None:
        check_text("Offload", "checksum", name)
        if name != CRC32 and (name not in hashlib.algorithms_available or name.startswith("shake")):
            raise InvalidArgument(f"Offload: checksum={shown(name)}; expected 'crc32', or such as 'blake2b'")

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of a piece of the parameters that is updated at once."""
        return sys.maxsize if self.folder is None else self.block_bytes // CHUNKS_PER_BLOCK

    @property
    def parts(self) -> frozenset[str]:
        """What is in files: "optimizer", "parameters", or both."""
        return frozenset(part.strip() for part in self.what.split(","))
