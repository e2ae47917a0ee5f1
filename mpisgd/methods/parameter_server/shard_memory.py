"""`ShardMemory`: the shards of a parameter server in a `Window`, each updated as a whole or not at all.

Whoever has the lock of a shard copies its valid version into the other place, changes that, and makes it the
valid one by writing one word. A rank that is killed in between leaves the valid one as it was.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.methods.parameter_server.layout import WORD_BYTES, ShardLayout
from mpisgd.rma.window import Window
from mpisgd.transport.ipc.control_block import order_memory

__all__ = ["ShardMemory", "Version"]

READS_WITHOUT_LOCK = 3


class Version:
    """One version of a shard in memory.

    Attributes:
        flat: all of it, bytes.
        counts: [ranks] how many updates of each rank are in it.
        flags: [entries] whether an entry exists.
        tensors: by parameter and key, the entries of the layout in their order.
        number: how many there have been before.
    """

    def __init__(self, flat: Tensor, layout: ShardLayout, number: int) -> None:
        self.flat, self.number = flat, number
        words = (layout.num_ranks + len(layout.entries)) * WORD_BYTES
        self.counts, self.flags = flat[:words].view(torch.int64).tensor_split([layout.num_ranks])
        self.tensors = {
            (entry.param, entry.key): flat[entry.start :][: entry.dtype.itemsize * _numel(entry.shape)]
            .view(entry.dtype)
            .view(entry.shape)
            for entry in layout.entries
        }

    def existing(self) -> dict[tuple[int, str], Tensor]:
        """Return the entries that exist."""
        flags = self.flags.tolist()
        return {key: t for (key, t), flag in zip(self.tensors.items(), flags, strict=True) if flag}


class ShardMemory:
    """The shards, in the memory of `owners`. Collective.

    Args:
        layouts: of the shards; empty ones take no part.
        owners: global ranks, one for each shard.
        group: all ranks that read and update them.
    """

    def __init__(self, layouts: Sequence[ShardLayout], owners: Sequence[int], group: Group) -> None:
        self.layouts, self.owners = layouts, owners
        me = group.ranks[group.rank]
        nbytes = layouts[owners.index(me)].nbytes if me in owners else 0
        self.window = Window(torch.zeros(nbytes, dtype=torch.uint8), group)
        self._shared = [self.window.local(owner) for owner in owners]
        self._versions: dict[tuple[int, int], Version] = {}
        self._next = [0] * len(layouts)

    def checkout(self, shard: int) -> Version:
        """Take the lock of a shard; return a copy of it to be changed, which `commit` makes valid."""
        self.window.lock(self.owners[shard])
        try:
            number = self._number(shard)
            self._next[shard] = number + 1
            version = self._version(shard, number + 1)
            self._load(shard, number, version.flat)
        except BaseException:
            self.give_up(shard)
            raise
        return version

    def commit(self, shard: int) -> None:
        """Make the copy the valid version, and give the lock back."""
        number, owner, shared = self._next[shard], self.owners[shard], self._shared[shard]
        if shared is None:
            layout = self.layouts[shard]
            self.window.put(self._version(shard, number).flat, owner, layout.start_of(number))
            self.window.flush(owner)
            self.window.put(torch.tensor([number]).view(torch.uint8), owner)
        else:
            order_memory()
            shared[:WORD_BYTES].view(torch.int64)[0] = number
        self.window.unlock(owner)

    def give_up(self, shard: int) -> None:
        """Leave the shard as it was, and give the lock back."""
        self.window.unlock(self.owners[shard])

    def read(self, shard: int) -> Version:
        """Return a copy of the valid version, for this rank alone.

        Without the lock, unless others commit faster than this rank can copy: the copy is good where the
        memory that was read has not become that of the next version but one.
        """
        flat = torch.empty(self.layouts[shard].version_bytes, dtype=torch.uint8)
        for _ in range(READS_WITHOUT_LOCK):
            number = self._number(shard)
            self._load(shard, number, flat)
            if self._number(shard) == number:
                return Version(flat, self.layouts[shard], number)
        with self.window.locked(self.owners[shard]):
            number = self._number(shard)
            self._load(shard, number, flat)
        return Version(flat, self.layouts[shard], number)

    def _number(self, shard: int) -> int:
        shared = self._shared[shard]
        if shared is None:
            word = self.window.get(torch.empty(WORD_BYTES, dtype=torch.uint8), self.owners[shard])
        else:
            order_memory()
            word = shared[:WORD_BYTES]
        return int(word.view(torch.int64).item())

    def _load(self, shard: int, number: int, into: Tensor) -> None:
        start, shared = self.layouts[shard].start_of(number), self._shared[shard]
        if shared is None:
            self.window.get(into, self.owners[shard], start)
        else:
            into.copy_(shared[start : start + into.numel()])
            order_memory()

    def _version(self, shard: int, number: int) -> Version:
        """Return where a version is changed: its place, or memory of this rank where that is far away."""
        layout, shared = self.layouts[shard], self._shared[shard]
        place = (shard, 0 if shared is None else number % 2)
        if place not in self._versions:
            start = layout.start_of(number)
            flat = (
                torch.empty(layout.version_bytes, dtype=torch.uint8)
                if shared is None
                else shared[start : start + layout.version_bytes]
            )
            self._versions[place] = Version(flat, layout, number)
        self._versions[place].number = number
        return self._versions[place]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
