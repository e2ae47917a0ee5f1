"""`CompressionState`: what the reducers of compressed buckets keep when plans, programs or ranks change.

A state is taken apart by parameter and put together again, for buckets of other parameters in another order:

    bucket (2, 0)   residual [r2 r2 r2 | r0 r0]   factors [Q2, Q0]     steps 7
    by parameter    2: residual, Q2, steps        0: residual, Q0, steps
    bucket (0, 1)   residual [r0 r0 | 0 0 0 0]    factors [Q0, None]   steps 7

`BucketReducer` says which entries are what. A residual is this rank's own: the same rank of as
many ranks gets it back from a state_dict. On another rank, or among another number of ranks, it begins at
zero, and what the ranks that saved nothing had not sent yet is lost. What is alike on all ranks (factors,
counts of steps) is taken over everywhere. Where the ranks change in a running job (`rebuild`), each keeps its
own, and that of a rank that is gone is lost.

A residual is kept in the order of a parameter's elements, and lies in a bucket as the gradient does: a
program may convert parameters, to channels last say, or be resumed with others.

What is drawn at random, or chosen in a bucket as a whole, depends on where the elements lie. So the order in
which gradients are packed, which was observed, is kept, too: the entry "place" of each parameter, alike.
Gradients of parameters that have had sparse ones travel as they are, dense ones, too. So these parameters
have an entry "sparse", alike.

It is a part of the state of a strategy; see `mpisgd.method_state`.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.compress.compressor import BucketReducer
from mpisgd.gradients.bucketing import Bucket
from mpisgd.gradients.fusion_buffer import StridedLayout
from mpisgd.gradients.gradient_flags import DENSE
from mpisgd.method_state import Pieces, copied

__all__ = ["CompressionState", "ReducedBucket", "Untouched"]

PLACE = "place"  # of a parameter in the order of packing
HAD_SPARSE = "sparse"  # gradients, on any rank

Entries = dict[str, dict[str, Any]]  # by parameter or bucket, then by name


class ReducedBucket(Protocol):
    """A bucket of tensors, by their numbers, and what reduces it."""

    @property
    def bucket(self) -> Bucket:
        """Which tensors, and where each lies."""

    @property
    def reducer(self) -> BucketReducer:
        """What reduces it, and may keep a state."""


class _Kept:
    """What reducers keep, taken apart.

    Args:
        alike: see below; what is given is not changed.
        own: by "own", "led" and "whole", as below.

    Attributes:
        own: this rank's, by parameter.
        alike: what all ranks have alike, by parameter.
        led: what some ranks have alike, and this one maybe none of it, by parameter.
        whole: this rank's, by bucket: what cannot be taken apart.
    """

    def __init__(self, alike: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.own: Entries = defaultdict(dict, _shallow(own.get("own", {})))
        self.alike: Entries = defaultdict(dict, _shallow(alike))
        self.led: Entries = defaultdict(dict, _shallow(own.get("led", {})))
        self.whole: Entries = _shallow(own.get("whole", {}))

    def add(self, slot: ReducedBucket, state: Mapping[str, Any]) -> None:
        """Take the state of a bucket's reducer apart."""
        bucket, keys = slot.bucket, keys_of(slot)
        numels = _numels(bucket)
        alike = self.led if slot.reducer.leads_alone else self.alike
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == (bucket.numel,):
                parts = cut_by(value, numels)
                for key, part, layout in zip(keys, parts, _layouts(slot), strict=True):
                    self.own[key][name] = _by_element(part, layout)
            elif isinstance(value, list) and len(value) == len(keys):
                for key, part in zip(keys, value, strict=True):
                    alike[key][name] = [part]  # in a list: an entry for each parameter
            elif value is None or isinstance(value, (bool, int, float, str, tuple)):
                for key in keys:
                    alike[key][name] = value
            else:
                self.whole.setdefault(",".join(keys), {})[name] = value

    def take(self, slot: ReducedBucket) -> dict[str, Any]:
        """Put the state of a bucket together, of which nothing stays here; {} where there is nothing."""
        keys, numels = keys_of(slot), _numels(slot.bucket)
        own = [self.own.pop(key, {}) for key in keys]
        alike = [{**self.alike.pop(key, {}), **self.led.pop(key, {})} for key in keys]
        state: dict[str, Any] = self.whole.pop(",".join(keys), {})
        for name in _names(own):
            state[name] = _joined([entries.get(name) for entries in own], numels, _layouts(slot))
        for name in _names(alike):
            values = [entries[name] for entries in alike if name in entries]
            is_list = isinstance(values[0], list)
            listed = [entries.get(name, [None])[0] for entries in alike] if is_list else []
            state[name] = listed if is_list else values[0]
        return state

    def take_order(self) -> tuple[int, ...]:
        """Return the order of packing, of which nothing stays here; () where there is none."""
        places = self._take_entries(PLACE)
        return tuple(sorted(places, key=places.__getitem__))

    def take_sparse(self) -> frozenset[int]:
        """Return the parameters that have had sparse gradients, of which nothing stays here."""
        return frozenset(self._take_entries(HAD_SPARSE))

    def _take_entries(self, name: str) -> dict[int, Any]:
        taken = {int(key): entries.pop(name) for key, entries in self.alike.items() if name in entries}
        self.alike = defaultdict(dict, {key: entries for key, entries in self.alike.items() if entries})
        return taken

    def pieces(self) -> Pieces:
        """Return it by whose it is, without what is empty."""
        parts = {"own": self.own, "led": self.led, "whole": self.whole}
        return Pieces(dict(self.alike), {name: dict(entries) for name, entries in parts.items() if entries})


class CompressionState:
    """States of bucket reducers, by parameter.

    Attributes:
        order: in which tensors are packed, by their numbers, where that was observed and matters; else ().
        sparse: tensors, by their numbers, that have had sparse gradients on any rank.
        keeps_sparse: whether these belong to the state: dense gradients of others are rounded on their way.
    """

    def __init__(self) -> None:
        self.order: tuple[int, ...] = ()
        self.sparse: frozenset[int] = frozenset()
        self.keeps_sparse = False
        self._slots: Sequence[ReducedBucket] = ()
        self._waiting = _Kept({}, {})  # of parameters that are in no bucket now

    def note_sparse(self, indices: Iterable[int], *, rounds: bool) -> None:
        """Note tensors that have had sparse gradients.

        Args:
            indices: their numbers.
            rounds: whether dense gradients of others are rounded on their way.
        """
        self.sparse |= frozenset(indices)
        self.keeps_sparse |= rounds

    def move_to(
        self, slots: Sequence[ReducedBucket], instead_of: Sequence[ReducedBucket] | None = None
    ) -> None:
        """Give the reducers of new buckets what those of the old ones keep.

        Args:
            slots: new buckets.
            instead_of: those that are no more; None: all that there were.
        """
        self._waiting = self._gathered()
        gone = None if instead_of is None else {id(slot) for slot in instead_of}
        left = [] if gone is None else [slot for slot in self._slots if id(slot) not in gone]
        self._slots = [*left, *slots]
        self._hand_out()

    def _hand_out(self) -> None:
        for slot in self._slots:
            if state := self._waiting.take(slot):
                slot.reducer.load_state_dict(state)

    def _gathered(self) -> _Kept:
        kept = _Kept(*self._waiting.pieces())
        for slot in self._slots:
            kept.add(slot, slot.reducer.state_dict())
        return kept

    # -- as a part of a method's state: see `mpisgd.method_state.Part` -----------------------------

    def pieces(self) -> Pieces:
        """Return this rank's states, the order of packing, and what was sparse; empty if nothing is kept."""
        kept = self._gathered()
        for place, index in enumerate(self.order):
            kept.alike[str(index)][PLACE] = place
        for index in sorted(self.sparse) if self.keeps_sparse else ():
            kept.alike[str(index)][HAD_SPARSE] = True
        return kept.pieces()

    def take(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Take over what `pieces()` has returned, now or as soon as there is a plan; the rest begins anew."""
        self._waiting = _Kept(copied(alike), copied(own or {}))
        self.order, self.sparse = self._waiting.take_order(), self._waiting.take_sparse()
        self.keeps_sparse |= bool(self.sparse)  # also where it is saved again before there is a plan
        for slot in self._slots:
            slot.reducer.reset()
        self._hand_out()

    def forget_own(self) -> None:
        """Begin anew with what is this rank's."""
        self.take(self.pieces().alike, None)


def keys_of(slot: ReducedBucket) -> list[str]:
    """Return the names of a bucket's tensors: by default their numbers."""
    named: Sequence[str] | None = getattr(slot, "keys", None)
    return [str(index) for index in slot.bucket.indices] if named is None else list(named)


def _shallow(entries: Mapping[str, Any]) -> Entries:
    return {key: dict(of_one) for key, of_one in entries.items()}


def _numels(bucket: Bucket) -> list[int]:
    edges = [*bucket.offsets, bucket.numel]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def _names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names in any of them, each once, in a fixed order."""
    return sorted({name for each in entries for name in each})


def _joined(
    parts: Sequence[Tensor | None], numels: Sequence[int], layouts: Sequence[StridedLayout | None]
) -> Tensor:
    """Return parts side by side, with zeros where one is missing or has become another size."""
    like = next(part for part in parts if part is not None)
    whole = [
        _in_memory(part, layout) if part is not None and part.numel() == numel else like.new_zeros(numel)
        for part, numel, layout in zip(parts, numels, layouts, strict=True)
    ]
    return torch.cat(whole)


def _layouts(slot: ReducedBucket) -> Sequence[StridedLayout | None]:
    """Return how each tensor of a bucket lies there; None: in the order of its elements."""
    layouts: Sequence[StridedLayout] | None = getattr(slot, "layouts", None)
    return [None] * len(slot.bucket.indices) if layouts is None else layouts


def _by_element(part: Tensor, layout: StridedLayout | None) -> Tensor:
    """Return a tensor as a gradient lies in memory, with its elements in order, which nothing changes."""
    return part if layout is None else part.as_strided(*layout).reshape(-1)


def _in_memory(part: Tensor, layout: StridedLayout | None) -> Tensor:
    """Return the reverse of `_by_element`."""
    if layout is None or part.as_strided(*layout).is_contiguous():
        return part
    moved = torch.empty_like(part)
    moved.as_strided(*layout).copy_(part.view(layout.shape))
    return moved


class Untouched:
    """Keeps the state of parameters of which no rank has a gradient, in a bucket that is about to be reduced.

    Such a parameter keeps `grad = None`, and nothing that arrives for it is used. Its elements lie in the
    bucket nevertheless, as zeros: with a residual something of it would be sent, and be gone; a velocity
    would go on without an update; a factor would turn to what was left out. So all that is declared as the
    reducer's state is put back as it was before, on every rank, as if the bucket had none of them.

    Args:
        slot: the bucket.
        flags: of its gradients, on any rank.
    """

    def __init__(self, slot: ReducedBucket, flags: bytes) -> None:
        edges = itertools.pairwise([*slot.bucket.offsets, slot.bucket.numel])
        self._slot = slot
        self._absent = [
            (place, start, stop)
            for place, (flag, (start, stop)) in enumerate(zip(flags, edges, strict=True))
            if not flag & DENSE
        ]
        self._kept = {where: memory.clone() for where, memory in self._memory()}

    def put_back(self) -> None:
        """Make it what it was; what there was none of begins at zero."""
        for where, memory in self._memory():
            if where in self._kept:
                memory.copy_(self._kept[where])
            else:
                memory.zero_()

    def _memory(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """Yield the memory of what is kept of these parameters now, by field and place."""
        reducer, bucket = self._slot.reducer, self._slot.bucket
        state = reducer.state_dict()
        for place, start, stop in self._absent:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == (bucket.numel,):
                    yield (name, place), value[start:stop]
                elif isinstance(value, list) and isinstance(entry := value[place], torch.Tensor):
                    yield (name, place), entry
            for name, value in reducer.kept_apart(start, stop).items():
                yield (name, place), value
