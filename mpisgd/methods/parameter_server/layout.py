"""How the parameters and the optimizer's state are divided into shards: plans as plain data.

A shard has whole parameters, so any optimizer can update it. It lies in the memory of one rank, twice: an
update is written beside the version that is valid, and a single word makes it the valid one.

    number | version 0: counts, flags, W, its momentum, b, ... | version 1: the same |
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mpisgd.gradients.bucketing import ALIGN_BYTES
from mpisgd.sharding.division import assign

__all__ = ["PARAMETER", "WORD_BYTES", "Entry", "Schema", "ShardLayout", "lay_out_shards"]

WORD_BYTES = 8
PARAMETER = ""  # the key of the parameter itself

Schema = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Entry(NamedTuple):
    """A tensor of a version: a parameter, or an entry of its state.

    Attributes:
        param: the place of the parameter in the optimizer's list.
        key: of its state; PARAMETER for itself.
        shape: of the tensor.
        dtype: of the tensor.
        start: the byte of the version at which it begins.
    """

    param: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class ShardLayout(NamedTuple):
    """What lies in a shard.

    Attributes:
        entries: in the order of memory.
        num_ranks: how many counts of applied updates come first, a word each; then a flag for each entry,
            whether it exists.
        version_bytes: of one version.
    """

    entries: tuple[Entry, ...]
    num_ranks: int
    version_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return ALIGN_BYTES + 2 * self.version_bytes

    def start_of(self, number: int) -> int:
        """Return the byte at which a version begins."""
        return ALIGN_BYTES + number % 2 * self.version_bytes


def lay_out_shards(schemas: Sequence[Schema], num_shards: int, num_ranks: int) -> list[ShardLayout]:
    """Divide parameters such that shards have about equally many bytes.

    Args:
        schemas: of each parameter and its state: shapes and dtypes by key.
        num_shards: how many there are to be.
        num_ranks: how many ranks may push.
    """
    owners = assign([sum(map(_nbytes, schema.values())) for schema in schemas], [0] * num_shards)
    return [
        _lay_out([i for i, owner in enumerate(owners) if owner == shard], schemas, num_ranks)
        for shard in range(num_shards)
    ]


def _lay_out(params: Sequence[int], schemas: Sequence[Schema], num_ranks: int) -> ShardLayout:
    tensors = [(i, key, *schemas[i][key]) for i in params for key in schemas[i]]
    end = _aligned((num_ranks + len(tensors)) * WORD_BYTES)
    entries = []
    for param, key, shape, dtype in tensors:
        entries.append(Entry(param, key, shape, dtype, end))
        end = _aligned(end + _nbytes((shape, dtype)))
    return ShardLayout(tuple(entries), num_ranks, end)


def _nbytes(tensor: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = tensor
    return math.prod(shape) * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
