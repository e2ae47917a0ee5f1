"""`Combiner`: how what the ranks have brought into the memory of buckets becomes one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpisgd import tracing
from mpisgd.collectives.all_reduce import choose_algorithm, reduce_tensor
from mpisgd.core.dtypes import ReduceOp
from mpisgd.core.group import Group
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.plan import BucketSlot
from mpisgd.transport.shm.reduction import reduce_to_owners
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["Combiner"]

# Torch puts tensors of 2 MiB, a large page, and more into such pages; the ends of smaller ones lie in others.
IN_LARGE_PAGES_BYTES = 8 * 2**20

Contents = Callable[[], Mapping[str, Any]]


class Combiner:
    """Reduces the carriers of a plan; the methods that do run inside the queue.

    Args:
        group: the ranks.
        recipe: how gradients become one.
    """

    def __init__(self, group: Group, recipe: ReductionOptions) -> None:
        self._group = group
        self._recipe = recipe

    @property
    def op(self) -> ReduceOp:
        """What is done element by element."""
        return self._recipe.op if self._recipe.predivide_factor == 1.0 else ReduceOp.SUM

    def way(self, carrier: BucketSlot) -> str:
        """Return the name of the plane that a carrier takes, for timelines."""
        if carrier.region is None and not carrier.on_plane and carrier.owner is None:
            return "auto"
        return "node" if self._group.shm is not None else "hierarchical"

    def combine_all(
        self, carriers: Sequence[BucketSlot], flats: Sequence[Tensor], contents: Callable[..., Contents]
    ) -> None:
        """Reduce several carriers, one after the other or, where each goes to one rank, all at once."""
        track = self._group.queue.track
        if any(carrier.owner is not None for carrier in carriers):
            with tracing.part(track, "gradients", sum(flat.nbytes for flat in flats), contents(*carriers)):
                self._bring_to_owners(carriers, flats)
            return
        for carrier, flat in zip(carriers, flats, strict=True):
            with tracing.part(track, "gradients", flat.nbytes, contents(carrier)):
                self.combine(flat, carrier)

    def combine(self, flat: Tensor, carrier: BucketSlot) -> None:
        """Reduce what a carrier holds."""
        if carrier.owner is not None:
            self._bring_to_owners([carrier], [flat])
            return
        op, plane = self.op, self._group.shm or self._group.internode
        if carrier.region is not None and plane is not None:
            plane.all_reduce_region(carrier.region, op)
        elif carrier.on_plane and self._group.internode is not None:
            self._group.internode.all_reduce_now(flat, op)  # to the other hosts' ranks it is the same
        else:
            wire = self._recipe.compression.compress(flat)
            reduce_tensor(self._group, wire, op, self._algorithm(wire))
            self._recipe.compression.decompress(wire, flat)
        self.undo_predivision(flat)

    def _algorithm(self, wire: Tensor) -> str:
        """Choose as for any tensor, but for one thing.

        What backward has just made has left the caches by now, and then shared memory is as quick as to reach
        into each other's (on 2 cores 2 and 4 ranks took 0.93 of the time, 3 ranks 1.3), unless the kernel
        finds it in large pages (1.13, 1.2 and 1.6).
        """
        chosen, cma = choose_algorithm(self._group, "auto", wire), self._group.transports.cma
        if chosen != "direct" or cma is None:
            return chosen
        return chosen if cma.huge_pages and wire.nbytes >= IN_LARGE_PAGES_BYTES else "node"

    def _bring_to_owners(self, carriers: Sequence[BucketSlot], flats: Sequence[Tensor]) -> None:
        """Reduce what carriers hold into their owners' memory: half of an all-reduce.

        Nobody waits at the end: the ranks must meet before anyone writes into a carrier again.
        """
        plane = self._group.shm
        assert plane is not None
        # Before the regions: ranks meet in there, and would wait for whoever still combines one of its own.
        _reduce_staged(plane, carriers, flats, self.op)
        for carrier, flat in zip(carriers, flats, strict=True):
            if carrier.region is not None:
                plane.reduce_region(carrier.region, self.op, _owner(carrier))
            if carrier.owner == plane.rank:
                self.undo_predivision(flat)

    def undo_predivision(self, flat: Tensor) -> None:
        """Turn a sum of what was divided before into the mean."""
        if (factor := self._recipe.predivide_factor) != 1.0:
            flat.mul_(factor / self._group.size)


def _reduce_staged(
    plane: ShmTransport, carriers: Sequence[BucketSlot], flats: Sequence[Tensor], op: ReduceOp
) -> None:
    staged = [(flat, _owner(c)) for c, flat in zip(carriers, flats, strict=True) if c.region is None]
    plane.run_steps(reduce_to_owners(plane, [flat for flat, _ in staged], [owner for _, owner in staged], op))


def _owner(carrier: BucketSlot) -> int:
    assert carrier.owner is not None
    return carrier.owner
