"""The file of a checkpoint: a safetensors file, which any reader of that format opens, with checksums inside.

    8 bytes          length of the header, little endian
    header           {"__metadata__": {"header_crc32": "89abcdef", "mpisgd": DOCUMENT},
                      NAME: {"dtype": "F32", "shape": [3, 4], "data_offsets": [BEGIN, END]}, ...}
    data             the tensors, one after the other without gaps, widest elements first

DOCUMENT is JSON: {"version": 1, "step": 300, "ranks": 4, "crc32": {NAME: ...}, "state": {...}, "rng": [...]};
"state" is described in `mpisgd.checkpoint.serialization`. The checksum of the header is that of the header
with eight zeros in its own place. So every byte of the file is covered, and a reader needs no pickle.
"""

import io
import json
import math
import os
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from mpisgd.checkpoint.serialization import tensor_names
from mpisgd.collectives.objects import Allocate
from mpisgd.dtypes import SAFETENSORS_DTYPES
from mpisgd.errors import CheckpointDamaged

__all__ = ["Document", "bytes_of", "read", "write"]

VERSION = 1
CHUNK_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 2**30
# Where the header's own checksum is: at one place in every file.
CRC_BEFORE = b'{"__metadata__":{"header_crc32":"'
CRC_DIGITS = slice(len(CRC_BEFORE), len(CRC_BEFORE) + 8)

_DTYPE_OF = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class Document(NamedTuple):
    """What is in a file beside the tensors.

    Attributes:
        step: the caller's number of it.
        ranks: how many there were.
        state: name to tree; see `tree.encode`.
        kinds: name to "object", for what has a `load_state_dict`, or "value".
        rng: one tree per rank; empty where none was saved.
    """

    step: int
    ranks: int
    state: dict[str, Any]
    kinds: dict[str, str]
    rng: list[Any]


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    crc32: int


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
    """
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].element_size())
    header = _header(document, ordered)
    file.write(struct.pack("<Q", len(header)) + header)
    for _, tensor in ordered:
        file.write(_memory(tensor))


def _header(document: Document, ordered: Sequence[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    crc32 = {name: zlib.crc32(_memory(tensor)) for name, tensor in ordered}
    description = json.dumps({"version": VERSION, **document._asdict(), "crc32": crc32}, allow_nan=False)
    metadata = {"header_crc32": "0" * 8, "mpisgd": description}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the tensors begin at a multiple of their elements' size
    return _with_crc(text, zlib.crc32(text))


def _with_crc(header: bytes, crc32: int) -> bytes:
    return header[: CRC_DIGITS.start] + b"%08x" % crc32 + header[CRC_DIGITS.stop :]


# --- reading ------------------------------------------------------------------------------------------


def read(
    path: Path, objects: Collection[str] = (), empty: Allocate | None = None
) -> tuple[Document, dict[str, Tensor]]:
    """Return what is in a checkpoint, after every byte of it was checked.

    Args:
        path: the file.
        objects: of which the tensors are wanted; those of plain values and of the generators always are.
        empty: makes their memory; ordinary one by default.

    Raises:
        CheckpointDamaged: it is not what was written; says what is wrong.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            document, entries = _read_header(file, path)
            names = [name for name, kind in document.kinds.items() if kind == "value" or name in objects]
            trees = [*(document.state[name] for name in names), *document.rng]
            wanted = {name for tree in trees for name in tensor_names(tree)}
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointDamaged(
                f"{path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}"
            ) from exc
        rooms = (_room(entry, empty) if entry.name in wanted else None for entry in entries)
        found = {
            entry.name: _read_tensor(file, path, entry, room)
            for entry, room in zip(entries, rooms, strict=True)
        }
    return document, {name: tensor for name, tensor in found.items() if tensor is not None}


def _read_header(file: io.BufferedReader, path: Path) -> tuple[Document, list[_Entry]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not len(CRC_BEFORE) + 8 < length <= min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointDamaged(f"{path} is cut short or no checkpoint: {size} bytes, header of {length}")
    header = bytearray(length)
    _read_into(file, header)
    if not header.startswith(CRC_BEFORE):
        raise CheckpointDamaged(f"{path} is no checkpoint of mpisgd, or its header is damaged")
    found = b"%08x" % zlib.crc32(_with_crc(bytes(header), 0))
    if found != header[CRC_DIGITS]:
        raise CheckpointDamaged(
            f"{path} is damaged: its header does not have the checksum that is written in it"
        )
    content = json.loads(bytes(header))
    fields = json.loads(content.pop("__metadata__")["mpisgd"])
    if fields.pop("version") != VERSION:
        raise CheckpointDamaged(
            f"{path} was written by another version of mpisgd, which this one cannot read"
        )
    entries = _entries(content, fields.pop("crc32"))
    end = 8 + length + sum(entry.nbytes for entry in entries)
    if end != size:
        raise CheckpointDamaged(f"{path} is cut short or damaged: {size} bytes instead of {end}")
    return Document(**fields), entries


def _entries(content: Mapping[str, Any], crc32: Mapping[str, int]) -> list[_Entry]:
    """Return what lies in the data, in its order."""
    entries = []
    end = 0
    for name, entry in sorted(content.items(), key=lambda pair: pair[1]["data_offsets"]):
        dtype, shape = _DTYPE_OF[entry["dtype"]], tuple(entry["shape"])
        nbytes = math.prod(shape) * dtype.itemsize
        begin, end = end, end + nbytes
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"{name} is not where it should be")
        entries.append(_Entry(name, dtype, shape, nbytes, crc32[name]))
    return entries


def _room(entry: _Entry, empty: Allocate | None) -> Tensor:
    if empty is not None:
        return empty(entry.shape, entry.dtype)
    return torch.empty(entry.shape, dtype=entry.dtype)


def _read_tensor(file: io.BufferedReader, path: Path, entry: _Entry, tensor: Tensor | None) -> Tensor | None:
    """Read one tensor into its memory, if it is to be kept, and check it."""
    if tensor is not None:
        _read_into(file, _memory(tensor))
        found = zlib.crc32(_memory(tensor))
    else:
        found = _skim(file, entry.nbytes)
    if found != entry.crc32:
        raise CheckpointDamaged(
            f"{path} is damaged: {entry.name} has checksum {found:08x}, not {entry.crc32:08x}"
        )
    return tensor


def _skim(file: io.BufferedReader, nbytes: int) -> int:
    """Return the checksum of the next bytes."""
    crc32, buffer = 0, memoryview(bytearray(min(nbytes, CHUNK_BYTES)))
    for begin in range(0, nbytes, CHUNK_BYTES):
        part = buffer[: nbytes - begin]
        _read_into(file, part)
        crc32 = zlib.crc32(part, crc32)
    return crc32


def _read_into(file: io.BufferedReader, memory: memoryview | bytearray) -> None:
    if file.readinto(memory) < len(memory):
        raise CheckpointDamaged(f"{file.name} ends too early: another process is writing it")
