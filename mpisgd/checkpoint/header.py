"""The header of a checkpoint's file: written, and read without trust.

Whoever can write to a folder can leave a file there with right checksums. So a header is only used after its
size, its depth and each of its values have been checked; everything else is `CheckpointDamaged`.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.arguments import printable, shown
from mpisgd.checkpoint.serialization import MAX_DEPTH, MAX_DIMS, WRONG_TREE
from mpisgd.checkpoint.storage import Location
from mpisgd.dtypes import SAFETENSORS_DTYPES
from mpisgd.errors import CheckpointDamaged, CheckpointError

__all__ = ["MAX_HEADER_BYTES", "MIN_HEADER_BYTES", "Document", "Entry", "make_header", "parse_header"]

VERSION = 1
MAX_HEADER_BYTES = 100_000_000  # more is refused by other readers of the format, too
MAX_VALUES = 4_000_000  # a value of two characters takes up to 70 bytes of memory when it was parsed
MAX_ELEMENTS_BYTES = 2**62
# Where the header's own checksum is: at one place in every file.
CRC_BEFORE = b'{"__metadata__":{"header_crc32":"'
CRC_DIGITS = slice(len(CRC_BEFORE), len(CRC_BEFORE) + 8)
MIN_HEADER_BYTES = CRC_DIGITS.stop

_DTYPE_OF = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_KINDS = ("object", "value", "rank")


class Document(NamedTuple):
    """What is in a file beside the tensors.

    Attributes:
        step: the caller's number of it.
        ranks: how many there were.
        state: name to tree; see `serialization.encode`.
        kinds: name to "object", for what has a `load_state_dict`, "value", or "rank", for what is one rank's.
        rng: one tree per rank; empty where none was saved.
    """

    step: int
    ranks: int
    state: dict[str, Any]
    kinds: dict[str, str]
    rng: list[Any]


class Entry(NamedTuple):
    """A tensor in the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    crc32: int


# --- writing ------------------------------------------------------------------------------------------


def make_header(document: Document, ordered: Sequence[tuple[str, Tensor]], crc32: Mapping[str, int]) -> bytes:
    """Return the header of tensors in their order.

    Raises:
        CheckpointError: it would be larger than what `parse_header` accepts.
    """
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    description = json.dumps({"version": VERSION, **document._asdict(), "crc32": crc32}, allow_nan=False)
    metadata = {"header_crc32": "0" * 8, "mpisgd": description}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the tensors begin at a multiple of their elements' size
    try:
        _check_amount(text)
    except ValueError as exc:
        raise CheckpointError(
            f"checkpoint.save: what is saved beside the tensors is too large: {exc}; save long lists as "
            "tensors or numpy arrays"
        ) from exc
    return text[: CRC_DIGITS.start] + _crc_digits(text) + text[CRC_DIGITS.stop :]


def _crc_digits(header: bytes) -> bytes:
    """Return the checksum of a header with zeros in the place of its checksum; without a copy of it."""
    memory = memoryview(header)
    before = zlib.crc32(b"0" * 8, zlib.crc32(memory[: CRC_DIGITS.start]))
    return b"%08x" % zlib.crc32(memory[CRC_DIGITS.stop :], before)


def _check_amount(text: bytes) -> None:
    """Raise ValueError where the parsed header would take too much memory."""
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes, at most {MAX_HEADER_BYTES} are accepted")
    num_values = sum(text.count(sign) for sign in (b",", b"[", b"{"))
    if num_values > MAX_VALUES:
        raise ValueError(f"the header has {num_values} values, at most {MAX_VALUES} are accepted")


# --- reading ------------------------------------------------------------------------------------------


def parse_header(header: bytes, path: Location) -> tuple[Document, list[Entry]]:
    """Return the document and the tensors, in the order of the data.

    Args:
        header: may be anything.
        path: for messages.

    Raises:
        CheckpointDamaged: it is not what `make_header` makes.
    """
    if not header.startswith(CRC_BEFORE):
        raise CheckpointDamaged(printable(f"{path} is no checkpoint of mpisgd, or its header is damaged"))
    if _crc_digits(header) != header[CRC_DIGITS]:
        raise CheckpointDamaged(
            printable(f"{path} is damaged: its header does not have the checksum that is written in it")
        )
    try:
        _check_amount(header)
        content = _mapping(_parsed(header), "the header")
        metadata = _mapping(content.pop("__metadata__"), "the metadata")
        fields = _mapping(_parsed(_text(metadata["mpisgd"], "the document")), "the document")
        if fields.pop("version") != VERSION:
            raise CheckpointDamaged(
                printable(f"{path} was written by another version of mpisgd, which this one cannot read")
            )
        entries = _entries(content, _mapping(fields.pop("crc32"), "crc32"))
        return _document(fields), entries
    except WRONG_TREE as exc:
        raise CheckpointDamaged(
            printable(f"{path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}")
        ) from exc


def _parsed(text: str | bytes) -> Any:
    found = json.loads(text, parse_constant=_refuse_constant)
    depth, level = 0, [found]
    while level := [
        inner
        for value in level
        if isinstance(value, (list, dict))
        for inner in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
        if depth > MAX_DEPTH + 4:  # the trees are in the document by name
            raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def _document(fields: dict[str, Any]) -> Document:
    if set(fields) != set(Document._fields):
        raise ValueError(f"the document has {shown(sorted(fields))}")
    document = Document(**fields)
    _number(document.step, "step")
    _number(document.ranks, "ranks", least=1)
    state, kinds = _mapping(document.state, "state"), _mapping(document.kinds, "kinds")
    if set(state) != set(kinds) or not all(kind in _KINDS for kind in kinds.values()):
        raise ValueError("kinds are not those of the state")
    if not isinstance(document.rng, list) or len(document.rng) not in (0, document.ranks):
        raise ValueError(f"generators are not those of {document.ranks} ranks")
    return document


def _entries(content: Mapping[str, Any], crc32: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of the data, in its order, without gaps."""
    placed = []
    for name, entry in content.items():
        fields = _mapping(entry, name)
        begin, end = (_number(offset, f"an offset of {name}") for offset in fields["data_offsets"])
        placed.append((begin, end, name, fields))
    entries = []
    expected = 0
    for begin, end, name, fields in sorted(placed, key=lambda one: one[:2]):
        dtype = _DTYPE_OF[_text(fields["dtype"], f"the dtype of {name}")]
        shape = _shape(fields["shape"], name)
        nbytes = math.prod(shape) * dtype.itemsize
        if begin != expected or end != begin + nbytes:
            raise ValueError(f"{name} is not where it should be")
        expected = end
        crc = _number(crc32[name], f"the checksum of {name}", most=2**32 - 1)
        entries.append(Entry(name, dtype, shape, nbytes, crc))
    return entries


def _shape(found: Any, name: str) -> tuple[int, ...]:
    if not isinstance(found, list) or len(found) > MAX_DIMS:
        raise ValueError(f"{name} has the shape {shown(found)}")
    shape = tuple(_number(size, f"a dimension of {name}") for size in found)
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS_BYTES:  # empty tensors can have such, too
        raise ValueError(f"{name} has the shape {shown(found)}")
    return shape


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{what} is a {type(value).__name__}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is a {type(value).__name__}")
    return value


def _number(value: Any, what: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {shown(value)}")
    return value
