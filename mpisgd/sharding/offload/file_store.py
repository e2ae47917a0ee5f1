"""`FileStore`: dictionaries of tensors in a file, in memory only while they are worked on.

Such as the optimizer state of the pieces of a rank.

A block of the file has the state of several pieces, in the order in which they were first updated:

    block 0   | exp_avg of piece 0 | exp_avg_sq of piece 0 | exp_avg of piece 1 | ...
    block 1   | exp_avg of piece 9 | ...

What is small, such as a count of steps, stays in memory.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.errors import OffloadError
from mpisgd.gradients.bucketing import ALIGN_BYTES
from mpisgd.gradients.fusion_buffer import StridedLayout, layout_of, window
from mpisgd.sharding.offload.block_cache import BlockCache, aligned_memory, checksum_of
from mpisgd.sharding.offload.block_store import BlockStore
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.error_agreement import raised_on_every_rank
from mpisgd.sharding.offload.mapped_memory import MappedMemory
from mpisgd.sharding.offload.private_file import memory_of, rounded_up
from mpisgd.sharding.offload.safetensors_header import Stored, header, header_room
from mpisgd.sharding.piece import Entries

__all__ = ["FileStore"]

STATES = 3  # tensors that an optimizer keeps for a piece, at most


class _Field(NamedTuple):
    """Where a tensor of a piece's state is in a block."""

    start: int
    dtype: torch.dtype
    layout: StridedLayout

    def view(self, block: Tensor) -> Tensor:
        numel = self.layout.shape.numel()
        flat = block[self.start : self.start + numel * self.dtype.itemsize].view(self.dtype)
        return window(flat, 0, self.layout)


class _Lent(NamedTuple):
    """The state of a piece while it is in memory: what the optimizer has got, and the views among that."""

    entries: dict[str, Any]
    views: dict[str, Tensor]

    @property
    def is_in_place(self) -> bool:
        """Return whether the optimizer has written into the views, and added or replaced nothing large."""
        return all(self.entries.get(name) is view for name, view in self.views.items()) and len(
            self.views
        ) == len(_offloadable(self.entries))


class _Record(NamedTuple):
    """The state of a piece.

    Attributes:
        block: in which its fields are; -1 where it has none.
        entries: what stays in memory, in the order of the optimizer; None in the place of a field.
        fields: what is in the block.
    """

    block: int
    entries: dict[str, Any]
    fields: dict[str, _Field]

    def fits(self, entries: Entries) -> bool:
        """Return whether these entries have the same fields."""
        found = {name: (value.dtype, layout_of(value)) for name, value in _offloadable(entries)}
        return found == {name: (field.dtype, field.layout) for name, field in self.fields.items()}

    def with_small(self, entries: Entries) -> "_Record":
        """Return a record with what stays in memory of these entries."""
        small = {name: None if name in self.fields else value for name, value in entries.items()}
        return self._replace(entries=small)


def _offloadable(entries: Entries) -> list[tuple[str, Tensor]]:
    return [(k, v) for k, v in entries.items() if isinstance(v, Tensor) and _is_worth_it(v)]


def _is_worth_it(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.nbytes >= ALIGN_BYTES


def _lines(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block: each begins at a cache line."""
    return -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES


class FileStore(MutableMapping[Any, dict[str, Any]]):
    """A `StateStore` whose tensors are in a file.

    What is asked for is brought into memory and stays there until it is released, and the state of the pieces
    that come next is read meanwhile.

    Args:
        offload: how blocks are read and written.
        blocks: where they are.
        name_of: names a key, for the header of the file.
        num_keys: about how many there will be: the header has room for them.

    Raises:
        OffloadError: from most methods; see `BlockCache`.
    """

    def __init__(
        self, offload: Offload, blocks: BlockStore, name_of: Callable[[Tensor], str], num_keys: int
    ) -> None:
        self._offload = offload
        self._name_of = name_of
        self._room = rounded_up(header_room(STATES * num_keys))
        self._records: dict[Tensor, _Record] = {}
        self._lent: dict[Tensor, _Lent] = {}  # what was asked for and not released
        self._others: defaultdict[Any, dict[str, Any]] = defaultdict(dict)  # what belongs to no piece
        self._open: dict[int, Tensor] = {}  # memory of the blocks in use
        self._changed: set[int] = set()
        self._filling: int | None = None  # the block to which new state is added
        self._used = 0  # bytes of it
        self._copies: MappedMemory | None = None
        self._is_listed = False  # whether the header says what is in the file
        self._held: OffloadError | None = None
        self._blocks = blocks
        blocks.allocate(self._room)
        checksum = checksum_of(offload.checksum)
        self._cache = BlockCache(blocks, offload.prefetch, offload.block_bytes, checksum)

    # -- as a dictionary -----------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self._raise_held()
        if not isinstance(key, Tensor):
            return self._others[key]
        if key not in self._lent:
            record = self._records.get(key)
            self._lent[key] = _Lent({}, {}) if record is None else self._fetched(record)
        return self._lent[key].entries

    def __setitem__(self, key: Any, entries: dict[str, Any]) -> None:
        self._raise_held()
        if isinstance(key, Tensor):
            self._lent[key] = _Lent(entries, {})
            self.release([key])
        else:
            self._others[key] = entries

    def __delitem__(self, key: Any) -> None:
        """Remove an entry; its room in the file is free again after `clear`."""
        if not isinstance(key, Tensor):
            del self._others[key]
        elif key in self:
            self._lent.pop(key, None)
            self._records.pop(key, None)
            self._is_listed = False
        else:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self._lent or key in self._records or key in self._others

    def __iter__(self) -> Iterator[Any]:
        added = [key for key in self._lent if key not in self._records]
        return iter([*self._records, *added, *self._others])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def pop(self, key: Any, *default: Any) -> dict[str, Any]:
        """See `StateStore`."""
        if key not in self:
            found: dict[str, Any] = default[0] if default else {}
            return found
        entries = dict(self.read(key))
        del self[key]
        return entries

    def clear(self) -> None:
        """Remove everything. What was read, or made by `empty`, stays as it is."""
        self._held = None
        for held in (self._records, self._lent, self._others, self._open):
            held.clear()
        self._changed.clear()
        self._filling = self._copies = None
        self._is_listed = False
        self._cache.clear()

    # -- in and out of memory ------------------------------------------------------------------------

    def read(self, key: Any) -> Entries:
        """See `StateStore`; the tensors are copies."""
        self._raise_held()
        if not isinstance(key, Tensor):
            return self._others.get(key, {})
        self.release([key] if key in self._lent else [])
        record = self._records.get(key)
        if record is None:
            return {}
        views = self._fetched(record).views
        self._put_all_but(record.block)
        return {**record.entries, **{name: self.copy_of(view) for name, view in views.items()}}

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor where `empty` makes them."""
        return window(self.empty((tensor.numel(),), tensor.dtype), 0, layout_of(tensor)).copy_(tensor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `StateStore`; in a file of its own."""
        if self._copies is None:
            assert self._offload.folder is not None
            self._copies = MappedMemory(self._offload.folder, f"a copy of the {self._blocks.described}")
        return self._copies.empty(shape, dtype)

    def release(self, keys: Iterable[Any], *, changed: bool = True) -> None:
        """See `StateStore`: what has changed is written, but for the block of the last key."""
        self._raise_held()
        last = -1
        for key in keys:
            lent = self._lent.pop(key, None)
            if lent is not None and not changed:
                last = self._records[key].block
            elif lent is not None:
                self._records[key] = self._kept(self._records.get(key), lent)
                last = self._records[key].block
        self._put_all_but(last)

    def end_step(self) -> None:
        """See `StateStore`; what is still being written is so while the program goes on."""
        self._raise_held()
        self._copies = None
        self._seal()
        self._put_all_but(-1)
        if not self._is_listed:
            self._write_header()

    @contextlib.contextmanager
    def held_errors(self) -> Iterator[None]:
        """See `StateStore`."""
        with contextlib.suppress(OffloadError), self._kept_errors():
            yield

    @contextlib.contextmanager
    def shared_errors(self, group: Group) -> Iterator[None]:
        """See `StateStore`."""
        with raised_on_every_rank(group), self._kept_errors():
            yield
            self._raise_held()

    @contextlib.contextmanager
    def _kept_errors(self) -> Iterator[None]:
        """Raise what went wrong again, whatever is done next: the content is lost."""
        try:
            yield
        except OffloadError as error:
            self._held = error
            raise

    def _raise_held(self) -> None:
        if self._held is not None:
            raise self._held

    def flush(self) -> int:
        """Wait until everything is in the file; return a descriptor of it, which safetensors can read."""
        self.end_step()
        self._cache.flush()
        return self._blocks.descriptor()

    def _write_header(self) -> None:
        """Say what is in the file; not if there are so many more keys now that the header has no room."""
        self._is_listed = True
        memory = aligned_memory(self._room)
        with contextlib.suppress(ValueError):
            memory_of(memory)[:] = header(self._stored(), self._room, self._blocks.size)
            self._blocks.write(memory_of(memory), 0)

    def _stored(self) -> list[Stored]:
        return [
            Stored(
                f"{self._name_of(key)}.{name}",
                field.dtype,
                tuple(field.layout.shape),
                self._cache.start_of(record.block) + field.start,
            )
            for key, record in self._records.items()
            for name, field in record.fields.items()
        ]

    def _fetched(self, record: _Record) -> _Lent:
        views = {name: field.view(self._block(record.block)) for name, field in record.fields.items()}
        return _Lent({**record.entries, **views}, views)

    def _block(self, index: int) -> Tensor:
        if index not in self._open:
            self._open[index] = self._cache.get(index)
        return self._open[index]

    def _kept(self, record: _Record | None, lent: _Lent) -> _Record:
        """Bring entries into a block, where they are not there already; return the record of them."""
        if record is None or not lent.is_in_place:
            record = self._copied(record, lent.entries)
        if record.fields:
            self._changed.add(record.block)
        return record.with_small(lent.entries)

    def _copied(self, record: _Record | None, entries: Entries) -> _Record:
        if record is None or not record.fits(entries):
            record = self._new_record(entries)
        for name, field in record.fields.items():
            place = field.view(self._block(record.block))
            if entries[name].data_ptr() != place.data_ptr():
                place.copy_(entries[name])
        return record

    def _new_record(self, entries: Entries) -> _Record:
        tensors = _offloadable(entries)
        self._is_listed = False
        if not tensors:
            return _Record(-1, {}, {})
        total = sum(_lines(tensor) for _, tensor in tensors)
        index, start = self._reserve(total)
        fields = {}
        for name, tensor in tensors:
            fields[name] = _Field(start, tensor.dtype, layout_of(tensor))
            start += _lines(tensor)
        return _Record(index, {}, fields)

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        """Return the block with room for new state, and where that begins."""
        if self._filling is not None and self._used + nbytes > self._open[self._filling].numel():
            self._seal()
        if self._filling is None:
            self._filling, memory = self._cache.append(max(nbytes, self._offload.block_bytes))
            memory.zero_()  # padding has checksums, too
            self._open[self._filling] = memory
            self._used = 0
        start, self._used = self._used, self._used + nbytes
        return self._filling, start

    def _seal(self) -> None:
        """Add nothing more to the block that is being filled."""
        filling, self._filling = self._filling, None
        if filling is not None:
            self._cache.seal(filling, self._used)

    def _put_all_but(self, last: int) -> None:
        """Have no block in use but this one and the one that is being filled."""
        for index in [index for index in self._open if index not in (last, self._filling)]:
            del self._open[index]
            self._cache.put(index, changed=index in self._changed)
            self._changed.discard(index)
