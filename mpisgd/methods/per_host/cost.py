"""What `PerHost` takes: a mean on each host, and its compressor's exchange between the first ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mpisgd.compress.compressor import Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import HOST, Bucket, Collective, Op, Wire, World
from mpisgd.methods.per_host.per_host import PerHost

__all__ = ["PerHostWire", "wire"]


def wire(method: PerHost, wire_of: Callable[[Compressor], Wire]) -> Wire:
    """Return the cost of a `PerHost`, given how to find its compressor's."""
    return PerHostWire(wire_of(method.compressor))


@dataclass(frozen=True)
class PerHostWire:
    """See `mpisgd.methods.cost_kit.Wire`.

    Attributes:
        inner: the compressor's, between hosts.
    """

    inner: Wire

    @property
    def warmup_steps(self) -> int:
        """As the compressor has it."""
        return self.inner.warmup_steps

    def changes(self, itemsize: int) -> bool:
        """Return whether floats of so many bytes travel as something else."""
        return self.inner.changes(itemsize)

    def cast_itemsize(self, itemsize: int) -> int | None:
        """Return None: sums on a host are of floats as they are."""
        return None if self.changes(itemsize) else itemsize

    def cost(self, bucket: Bucket, world: World, step: int) -> Iterator[Op]:
        """Yield what becomes of a bucket."""
        if not self.changes(bucket.itemsize):
            yield from self.inner.cost(bucket, world, step)
            return
        if world.ranks_per_host > 1:
            yield Collective("all_reduce", bucket.nbytes, HOST, bucket.itemsize)
        if world.hosts > 1:
            yield from self.inner.cost(bucket, world.leaders, step)

    def exchange(self, bucket: Bucket, world: World, graph: Any, phase: int) -> Iterator[Op]:
        """Refuse: gossip has no first ranks of hosts."""
        raise InvalidArgument("plan: PerHost is no compressor of messages to neighbours")

    def kept_bytes(self, bucket: Bucket, world: World) -> float:
        """Return the bytes that the first rank of a host keeps."""
        return self.inner.kept_bytes(bucket, world)
