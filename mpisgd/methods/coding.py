"""`Coded`: the cost of a compressor: its bytes for a bucket, and what it takes to make them.

The bytes are those that its own reducer tells, made on the meta device, where a residual of billions of
elements takes no memory; so is what it keeps. Its method `coding()` says the rest: see `Coding`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mpisgd.compress.compressor import BucketLayout, Compressor, codec_of, wire_dtype_of
from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import Alloc, Bucket, Collective, Compute, Free, Op, World

__all__ = ["Coded", "Coding", "dtype_of"]

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
GATHERED = ("all_gather",)


class Coding(NamedTuple):
    """What a compressor does beside its bytes.

    Attributes:
        collectives: one after the other; they share the bytes.
        element_s: of compressing and decompressing an element: an estimate for a core of a CPU whose memory
            has 10 GB/s. They differ by model and machine; a cluster file may have measured ones.
        copies: how many times there are the numbers of a bucket, as they are compressed, besides at most
            meanwhile; the bucket itself, messages and what is kept left out.
        of_largest: likewise of its largest parameter.
        of_chunk: likewise of a rank's share of it.
        kept: how many times the numbers are kept on each of so many ranks; None: as its reducer has it from
            the beginning.
        by_data: whether the bytes depend on the gradients, so that nobody knows them before.
    """

    collectives: tuple[str, ...] = GATHERED
    element_s: float = 20e-9
    copies: float = 1.0
    of_largest: float = 0.0
    of_chunk: float = 0.0
    kept: Callable[[int], float] | None = None
    by_data: bool = False


def dtype_of(itemsize: int) -> torch.dtype:
    """Return the floating dtype of so many bytes."""
    return DTYPES[itemsize]


@dataclass(frozen=True)
class Coded:
    """See `mpisgd.methods.cost_kit.Wire`.

    Attributes:
        compressor: a description.
        coding: what it does.
    """

    compressor: Compressor
    coding: Coding

    @property
    def warmup_steps(self) -> int:
        """After how many steps every one costs the same."""
        return int(getattr(self.compressor, "warmup_steps", 0))

    def changes(self, itemsize: int) -> bool:
        """Return whether floats of so many bytes travel as something else."""
        return self.compressor.changes(dtype_of(itemsize))

    def cast_itemsize(self, itemsize: int) -> int | None:
        """Return as how many bytes they travel if a cast is all that happens to them, else None."""
        dtype = wire_dtype_of(self.compressor, dtype_of(itemsize))
        return None if dtype is None else dtype.itemsize

    def cost(self, bucket: Bucket, world: World, step: int) -> Iterator[Op]:
        """Yield what becomes of a bucket, by as many ranks as the world's group has."""
        if not self.changes(bucket.itemsize):
            yield Collective("all_reduce", bucket.nbytes, world.group, bucket.itemsize)
            return
        if self.coding.by_data:
            raise InvalidArgument(f"plan: the bytes of {self.compressor} depend on the gradients")
        size, kinds = world.size, self.coding.collectives
        sent = _sent_bytes(self.compressor, _layout(bucket), size, min(step, self.warmup_steps + 1))
        sums = set(kinds) == {"all_reduce"}
        scratch = self._scratch(bucket, world)
        if not sums:  # messages of all, and this rank's until it is among them
            scratch = max(scratch, sent / (size - 1)) + sent * size / (size - 1)
        yield Alloc("compression", scratch)
        yield self._work(bucket, 0 if sums else sent, len(kinds))
        for kind in kinds:
            # 2 (p - 1) / p of what is summed is sent, and (p - 1) / p of what is gathered.
            nbytes = sent * size / ((size - 1) * len(kinds) * (2 if sums else 1))
            wide = (self.cast_itemsize(bucket.itemsize) or 4) if sums else 0
            yield Collective(kind, nbytes, world.group, wide)
        yield Free("compression", scratch)

    def _scratch(self, bucket: Bucket, world: World) -> float:
        coding, largest = self.coding, max(each.numel for each in bucket.parameters)
        numbers = (coding.copies + coding.of_chunk / world.size) * bucket.numel + coding.of_largest * largest
        return numbers * max(4, bucket.itemsize)

    def _work(self, bucket: Bucket, arrived: float, number: int) -> Compute:
        return Compute(
            "compress",
            elements=bucket.numel,
            arrived_bytes=arrived,
            num_collectives=number,
            by=self.compressor,
            element_s=self.coding.element_s,
        )

    def exchange(self, bucket: Bucket, world: World, graph: Any, phase: int) -> Iterator[Op]:
        """Yield a message by the compressor's codec to each neighbour."""
        codec = codec_of(self.compressor, _layout(bucket)._replace(device=torch.device("cpu")))
        if codec is None:
            raise InvalidArgument(
                f"plan: {self.compressor} is no contraction, as messages to neighbours need it"
            )
        nbytes, scratch = codec.nbytes, self._scratch(bucket, world)
        _, degree = graph.degrees(world.size, phase)
        yield Alloc("compression", scratch + (1 + degree) * nbytes)
        yield self._work(bucket, nbytes, 1)
        yield Collective("exchange", nbytes, graph=graph, phase=phase)
        yield Free("compression", scratch + (1 + degree) * nbytes)

    def kept_bytes(self, bucket: Bucket, world: World) -> float:
        """Return the bytes that its reducer keeps of a bucket."""
        if not self.changes(bucket.itemsize):
            return 0.0
        if self.coding.kept is not None:
            return self.coding.kept(world.size) * bucket.numel * max(4, bucket.itemsize)
        found = sum(map(_nbytes, self.compressor.reducer(_layout(bucket)).state_dict().values()))
        # One whose residual is made in its first step has none yet.
        return found or (bucket.nbytes if self.compressor.traits.has_error_feedback else 0.0)


def _layout(bucket: Bucket) -> BucketLayout:
    shapes = tuple(torch.Size(each.shape) for each in bucket.parameters)
    return BucketLayout(shapes, dtype_of(bucket.itemsize), torch.device("meta"))


@lru_cache(maxsize=4096)
def _sent_bytes(compressor: Compressor, layout: BucketLayout, size: int, step: int) -> int:
    """Return the bytes that each of `size` ranks sends of a bucket in a step."""
    reducer = compressor.reducer(layout)
    reducer.load_state_dict({**reducer.state_dict(), "steps": max(0, step - 1)})
    return reducer.bytes_on_the_wire(size)


def _nbytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.nbytes)
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0.0
