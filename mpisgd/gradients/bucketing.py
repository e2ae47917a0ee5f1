"""Which gradients travel together: a plan as plain data, the same on every rank.

Hundreds of small messages cost far more than a few large ones, so gradients are packed into buckets.
Every rank must cut the same buckets and launch them in the same order, or the job sums unrelated
numbers. Hence the plan is a pure function of sizes, types and an order, and it has a hash that ranks
can compare.

Backward yields gradients in roughly the reverse of the order in which parameters were registered.
With two types the buckets of one type fill up while those of the other are open:

    taken    a(f32)  b(bf16)  c(f32)  d(f32) | cap of f32 passed  e(f32)  f(bf16)
    buckets  [a, c, d] f32 complete at d       [e] f32 at e       [b, f] bf16 at f

They are launched as they become complete: nothing that is ready waits for something that is not.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument

__all__ = ["ALIGN_BYTES", "Bucket", "Item", "join_buckets", "launch_order", "plan_buckets", "plan_hash"]

ALIGN_BYTES = 64  # a cache line


@dataclass(frozen=True)
class Item:
    """One parameter, as far as packing is concerned.

    Attributes:
        index: its place in the optimizer's parameter list.
        numel: elements, 0 or more.
        itemsize: bytes per element.
        key: what may share a bucket: dtype and device, such as "float32:cpu".
    """

    index: int
    numel: int
    itemsize: int
    key: str


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel as one message.

    Attributes:
        key: the `Item.key` they share.
        indices: the parameters, in the order of the storage.
        offsets: where each begins in the bucket's flat storage, in elements, ascending.
        numel: elements from the start of the storage to the end of the last item, the padding between
            items included.
    """

    key: str
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


class _Open:
    """A bucket that still takes items; `completed_at` is the position in the order of its last one."""

    def __init__(self, key: str, itemsize: int, align_bytes: int) -> None:
        self.key = key
        self.items: list[Item] = []
        self.numel = 0
        self.completed_at = -1
        # The smallest step that is a whole number of elements and of alignment units: an itemsize that
        # does not divide `align_bytes` must not break either promise.
        self._step = math.lcm(align_bytes, itemsize) // itemsize

    def _aligned(self, numel: int) -> int:
        return -(-numel // self._step) * self._step

    def numel_with(self, item: Item) -> int:
        return self._aligned(self.numel) + item.numel

    def add(self, item: Item, position: int) -> None:
        self.numel = self.numel_with(item)
        self.items.append(item)
        self.completed_at = position

    def laid_out(self, place_of: Mapping[int, int]) -> Bucket:
        """Return the bucket, its items in the order of these places; in that of their coming without any."""
        items = sorted(self.items, key=lambda item: place_of[item.index]) if place_of else self.items
        offsets, numel = [], 0
        for item in items:
            offsets.append(self._aligned(numel))
            numel = offsets[-1] + item.numel
        return Bucket(self.key, tuple(item.index for item in items), tuple(offsets), numel)


def plan_buckets(
    items: Sequence[Item],
    *,
    cap_bytes: int,
    order: Sequence[int] | None = None,
    align_bytes: int = ALIGN_BYTES,
    alone_bytes: float = math.inf,
    storage_order: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Cut `items` into buckets of at most `cap_bytes`, in the order in which they will be complete.

    Items are taken in `order`; each key has one bucket open at a time, which is closed when the next item
    of that key would pass the cap. An item larger than the cap is alone in its bucket.

    Args:
        items: the parameters that have gradients, in any sequence; indices may have gaps.
        cap_bytes: most bytes of one bucket, padding included.
        order: every item's `index` once, in the order gradients are expected; default: descending.
        align_bytes: every item begins at a multiple of this, so that vector loads, and the ranges that
            ranks own in shared memory, do not straddle two items' cache lines.
        alone_bytes: an item of at least this size is alone in its bucket, too.
        storage_order: every item's `index`, in the order in which those of a bucket lie there; default:
            `order`.

    Raises:
        InvalidArgument: a size that is impossible, an index given twice, two element sizes under one key, or
            an `order` that is not a permutation of the indices.
    """
    check_positive("buckets", "cap_bytes", cap_bytes, whole=True)
    check_positive("buckets", "align_bytes", align_bytes, whole=True)
    by_index = _by_index(items)
    taken = sorted(by_index, reverse=True) if order is None else list(order)
    _check_permutation(taken, by_index)
    buckets: list[_Open] = []
    open_by_key: dict[str, _Open] = {}
    for position, index in enumerate(taken):
        item = by_index[index]
        is_alone = item.numel * item.itemsize >= alone_bytes
        bucket = None if is_alone else open_by_key.get(item.key)
        if bucket is None or bucket.numel_with(item) * item.itemsize > cap_bytes:
            bucket = _Open(item.key, item.itemsize, align_bytes)
            buckets.append(bucket)
            if not is_alone:
                open_by_key[item.key] = bucket
        bucket.add(item, position)
    buckets.sort(key=lambda bucket: bucket.completed_at)
    place_of = {index: place for place, index in enumerate(storage_order or ())}
    return tuple(bucket.laid_out(place_of) for bucket in buckets)


def join_buckets(sizes: Sequence[int], cap_bytes: int) -> list[tuple[int, ...]]:
    """Return the places of buckets that are sent as one operation: neighbours of at most `cap_bytes`.

    Args:
        sizes: of the buckets, in bytes, in the order in which they are sent.
        cap_bytes: a larger bucket is sent alone.
    """
    joined: list[list[int]] = []
    total = 0
    for place, size in enumerate(sizes):
        if not joined or total + size > cap_bytes:
            joined.append([])
            total = 0
        joined[-1].append(place)
        total += size
    return [tuple(places) for places in joined]


def plan_hash(buckets: Iterable[Bucket]) -> int:
    """Return a 64-bit number, 0 <= hash < 2**64, that differs when anything in the plan differs.

    Ranks compare it, so it must not depend on the process or the Python version (as `hash()` does).
    """
    plan = [[bucket.key, bucket.indices, bucket.offsets, bucket.numel] for bucket in buckets]
    digest = hashlib.blake2b(json.dumps(plan).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def launch_order(num_items: int, observed: Sequence[int]) -> tuple[int, ...]:
    """Return all of `range(num_items)`: first as `observed`, then the never observed, descending.

    A parameter that got no gradient when the order was observed is likely to get none again. At the end
    it delays nobody.

    Raises:
        InvalidArgument: `observed` names an index twice, or one outside `range(num_items)`.
    """
    seen = set(observed)
    _check_once(observed, "observed")
    if outside := sorted(seen.difference(range(num_items))):
        raise InvalidArgument(f"observed order has index {outside[0]}; there are {num_items} items")
    return (*observed, *(index for index in reversed(range(num_items)) if index not in seen))


def _by_index(items: Sequence[Item]) -> dict[int, Item]:
    _check_once([item.index for item in items], "item")
    itemsizes: dict[str, int] = {}
    for item in items:
        if item.numel < 0 or item.itemsize <= 0:
            raise InvalidArgument(
                f"item {item.index}: impossible numel {item.numel}, itemsize {item.itemsize}"
            )
        known = itemsizes.setdefault(item.key, item.itemsize)
        if known != item.itemsize:
            raise InvalidArgument(
                f"item {item.index}: itemsize {item.itemsize} under key {item.key!r}, whose other items "
                f"have {known}; a key names one dtype"
            )
    return {item.index: item for item in items}


def _check_permutation(order: Sequence[int], by_index: dict[int, Item]) -> None:
    _check_once(order, "order")
    if unknown := [index for index in order if index not in by_index]:
        raise InvalidArgument(f"order has index {unknown[0]}, which no item has")
    if missing := by_index.keys() - set(order):
        raise InvalidArgument(
            f"order lacks index {min(missing)}: {len(order)} given for {len(by_index)} items"
        )


def _check_once(indices: Sequence[int], what: str) -> None:
    seen: set[int] = set()
    for index in indices:
        if index in seen:
            raise InvalidArgument(f"{what} index {index} occurs twice")
        seen.add(index)
