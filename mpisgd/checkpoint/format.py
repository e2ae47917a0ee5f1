"""The file of a checkpoint: a safetensors file, which any reader of that format opens, with checksums inside.

    8 bytes          length of the header, little endian
    header           {"__metadata__": {"header_crc32": "89abcdef", "mpisgd": DOCUMENT},
                      NAME: {"dtype": "F32", "shape": [3, 4], "data_offsets": [BEGIN, END]}, ...}
    data             the tensors, one after the other without gaps, widest elements first

DOCUMENT is JSON: {"version": 1, "step": 300, "ranks": 4, "crc32": {NAME: ...}, "state": {...}, "rng": [...]};
"state" is described in `mpisgd.checkpoint.serialization`. The checksum of the header is that of the header
with eight zeros in its own place. So every byte of the file is covered, and a reader needs no pickle.
"""

import contextlib
import io
import struct
import zlib
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mpisgd.arguments import printable
from mpisgd.checkpoint.header import (
    MAX_HEADER_BYTES,
    MIN_HEADER_BYTES,
    Document,
    Entry,
    make_header,
    parse_header,
)
from mpisgd.checkpoint.serialization import WRONG_TREE, decode, tensor_names
from mpisgd.checkpoint.storage import Location, Storage
from mpisgd.errors import CheckpointDamaged

__all__ = ["Document", "Entry", "Opened", "bytes_of", "read", "read_all", "write"]

CHUNK_BYTES = 16 * 2**20


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _memory(tensor: Tensor) -> memoryview:
    array: Any = bytes_of(tensor).numpy()
    return memoryview(array)


# --- writing ------------------------------------------------------------------------------------------


def write(file: BinaryIO, document: Document, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint into a file.

    Args:
        file: at its beginning.
        document: what stands beside the tensors.
        tensors: of the CPU, contiguous.

    Raises:
        CheckpointError: what is beside the tensors is too large.
    """
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].element_size())
    crc32 = {name: zlib.crc32(_memory(tensor)) for name, tensor in ordered}
    header = make_header(document, ordered, crc32)
    file.write(struct.pack("<Q", len(header)) + header)
    for _, tensor in ordered:
        file.write(_memory(tensor))


# --- reading ------------------------------------------------------------------------------------------


class Opened:
    """A checkpoint whose header is intact, and whose tensors are read one after the other.

    What goes wrong meanwhile is raised at the end: whoever sends each tensor on goes on until then with
    any content, as those do who receive it.

    Args:
        storage: where it is.
        name: of the file.
        objects: of which the tensors are wanted; those of plain values and of the generators always are.

    Attributes:
        path: of the file.
        document: what stands beside the tensors.
        file: open until `close`, or until whoever gives up closes it.
        entries: the tensors, in the order in which they are to be read.
        wanted: names of those that are to be kept.

    Raises:
        CheckpointDamaged: its header is not what was written; says what is wrong.
        OSError: it cannot be read.
    """

    def __init__(self, storage: Storage, name: str, objects: Collection[str] = ()) -> None:
        self.path = storage.at(name)
        self._error: Exception | None = None
        self.file, size = _opened(storage, name)
        try:
            self.document, self.entries = _read_header(self.file, size, self.path)
            self.wanted = _wanted(self.document, self.entries, objects, self.path)
        except BaseException:
            self.file.close()
            raise

    def read(self, entry: Entry, room: Tensor | None) -> None:
        """Read the next tensor into contiguous memory, None if it is not to be kept, and check it."""
        if self._error is None:
            try:
                _read_tensor(self.file, self.path, entry, room)
            except Exception as exc:
                self._error = exc

    def close(self) -> None:
        """Close the file, and raise what went wrong.

        Raises:
            CheckpointDamaged: a tensor is not what was written; says which.
            OSError: it could not be read.
        """
        self.file.close()
        if self._error is not None:
            raise self._error


def read(storage: Storage, name: str, objects: Collection[str] = ()) -> tuple[Document, dict[str, Tensor]]:
    """Read a checkpoint, after every byte of it was checked.

    Args:
        storage: where it is.
        name: of the file.
        objects: as for `Opened`.

    Raises:
        CheckpointDamaged: it is not what was written; says what is wrong.
        OSError: it cannot be read.
    """
    with contextlib.closing(Opened(storage, name, objects)) as opened:
        tensors = read_all(opened)
    return opened.document, tensors


def read_all(opened: Opened) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint; return those that are wanted."""
    tensors = {}
    for entry in opened.entries:
        if entry.name in opened.wanted:
            tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
        opened.read(entry, tensors.get(entry.name))
    return tensors


def _opened(storage: Storage, name: str) -> tuple[io.BufferedIOBase, int]:
    try:
        return storage.open(name)
    except ValueError as exc:
        raise CheckpointDamaged(printable(f"{storage.at(name)} is no checkpoint: {exc}")) from exc


def _read_header(file: io.BufferedIOBase, size: int, path: Location) -> tuple[Document, list[Entry]]:
    length = int.from_bytes(file.read(8), "little")
    if not MIN_HEADER_BYTES < length <= min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointDamaged(
            printable(f"{path} is cut short or no checkpoint: {size} bytes, header of {length}")
        )
    document, entries = parse_header(file.read(length), path)
    end = 8 + length + sum(entry.nbytes for entry in entries)
    if end != size:
        raise CheckpointDamaged(printable(f"{path} is cut short or damaged: {size} bytes instead of {end}"))
    return document, entries


def _wanted(document: Document, entries: list[Entry], objects: Collection[str], path: Location) -> set[str]:
    """Return which tensors are to be kept, once all trees can be decoded, with tensors as in this file."""
    alike = {entry.name: torch.zeros((), dtype=entry.dtype).expand(entry.shape) for entry in entries}
    names = [name for name, kind in document.kinds.items() if kind == "value" or name in objects]
    try:
        for tree in (*document.state.values(), *document.rng):
            decode(tree, alike)
        trees = [*(document.state[name] for name in names), *document.rng]
        return {name for tree in trees for name in tensor_names(tree)}
    except WRONG_TREE as exc:
        raise CheckpointDamaged(
            printable(f"{path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}")
        ) from exc


def _read_tensor(file: io.BufferedIOBase, path: Location, entry: Entry, tensor: Tensor | None) -> None:
    """Read one tensor into its memory, if it is to be kept, and check it."""
    if tensor is not None:
        _read_into(file, path, _memory(tensor))
        found = zlib.crc32(_memory(tensor))
    else:
        found = _skim(file, path, entry.nbytes)
    if found != entry.crc32:
        raise CheckpointDamaged(
            printable(f"{path} is damaged: {entry.name} has checksum {found:08x}, not {entry.crc32:08x}")
        )


def _skim(file: io.BufferedIOBase, path: Location, nbytes: int) -> int:
    """Return the checksum of the next bytes."""
    crc32, buffer = 0, memoryview(bytearray(min(nbytes, CHUNK_BYTES)))
    for begin in range(0, nbytes, CHUNK_BYTES):
        part = buffer[: nbytes - begin]
        _read_into(file, path, part)
        crc32 = zlib.crc32(part, crc32)
    return crc32


def _read_into(file: io.BufferedIOBase, path: Location, memory: memoryview) -> None:
    while memory:
        if (num_read := file.readinto(memory)) == 0:
            raise CheckpointDamaged(f"{path} ends too early: another process is writing it")
        memory = memory[num_read:]
