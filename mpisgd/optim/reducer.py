"""`GradientReducer`: makes the gradients of a list of parameters the same on every rank.

It looks at `p.grad` at the moment it is called, whatever the program did before: None, the place in the
fusion buffer where the last reduction left it, a fresh tensor of autograd's or of the user's. Afterwards
every gradient that exists on some rank is a view of the fusion buffer, and the others are None.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.comm.buffers import dtype_name
from mpisgd.comm.collectives.all_reduce import choose_algorithm, reduce_flat
from mpisgd.comm.dtypes import ReduceOp
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Operation
from mpisgd.comm.node.region import Region
from mpisgd.comm.node.segment import Segment
from mpisgd.compress.cast import Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.fusion.bucketing import Bucket, Item, launch_order, plan_buckets, plan_hash
from mpisgd.fusion.buffer import FusionBuffer, num_elements
from mpisgd.optim.sparse import reduce_sparse

__all__ = ["GradientReducer", "Recipe", "check_recipe"]


class Recipe(NamedTuple):
    """How gradients become one.

    Attributes:
        op: SUM or AVG.
        compression: what travels.
        predivide_factor: divide by this before the sum, and by size / factor after it (AVG only).
        bucket_cap_bytes: gradients travel in buckets of at most this many bytes.
    """

    op: ReduceOp
    compression: Compressor
    predivide_factor: float
    bucket_cap_bytes: int


def check_recipe(recipe: Recipe) -> None:
    """Raise InvalidArgument where a recipe makes no sense."""
    if recipe.op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise InvalidArgument(f"op={recipe.op!r}; gradients can be combined by AVG or SUM")
    if not isinstance(recipe.compression, Compressor):
        raise InvalidArgument(f"compression={recipe.compression!r}; expected one of mpisgd.Compression's")
    if not recipe.predivide_factor > 0:
        raise InvalidArgument(
            f"gradient_predivide_factor={recipe.predivide_factor!r}; expected a positive one"
        )
    if recipe.predivide_factor != 1.0 and recipe.op is not ReduceOp.AVG:
        raise InvalidArgument("gradient_predivide_factor goes with op=AVG")
    if not recipe.bucket_cap_bytes > 0:
        raise InvalidArgument(f"bucket_cap_bytes={recipe.bucket_cap_bytes!r}; expected a positive number")


class GradientReducer:
    """The fusion buffers of a list of parameters, and the plan they follow.

    Args:
        params: all parameters that may ever have a gradient; the list may grow at its end.
        group: the ranks that take part.
        recipe: how to reduce.
    """

    def __init__(self, params: list[Tensor], group: Group, recipe: Recipe) -> None:
        self.params = params
        self.group = group
        self.recipe = recipe
        self._buffers: list[FusionBuffer] = []
        self._regions: list[Region | None] = []
        self._covered: tuple[int, ...] | None = None
        self._sparse: set[int] = set()
        self._marks: dict[int, int] = {}
        self._plan = ""

    @torch.no_grad()
    def reduce(self, when: str, observed: Sequence[int] = ()) -> None:
        """Combine every gradient over the ranks. Collective.

        Args:
            when: which reduction of the program this is; ranks that are at different ones are told so.
            observed: the order in which gradients became ready, for the next plan.

        Raises:
            CollectiveMismatch: ranks have different sets of trainable parameters, or are at different
                steps; raised on every rank, gradients are unreduced.
        """
        if self.group.size == 1:
            return
        covered = tuple(i for i, p in enumerate(self.params) if p.requires_grad or p.grad is not None)
        if covered != self._covered or self._fits_no_more():
            self._agree_on_plan(covered, observed, when)
        late: list[int] = []
        for number, buffer in enumerate(self._buffers):
            late += self._reduce_bucket(number, buffer, when)
        apart = sorted(self._sparse.union(late))
        if apart:
            self._reduce_apart(apart, set(late))

    def cover(self, params: list[Tensor]) -> None:
        """Take over another list of parameters; the next reduction makes a new plan."""
        self.params = params
        self._buffers = []
        self._sparse = set()
        self._covered = None

    @property
    def views(self) -> dict[int, Tensor]:
        """Where the gradient of each parameter lies in the fusion buffers, by the parameter's index."""
        return {
            index: view
            for buffer in self._buffers
            for index, view in zip(buffer.bucket.indices, buffer.views, strict=True)
        }

    def holds_reduced(self) -> bool:
        """Return whether some gradient is still the one that the last reduction left, or adds to it."""
        return any(self.params[index].grad is view for index, view in self.views.items())

    def mark(self) -> None:
        """Remember the state of the gradients for `kept_since_mark`."""
        self._marks = {index: view._version for index, view in self.views.items()}

    def kept_since_mark(self, num_added: Mapping[int, int]) -> bool:
        """Return whether some gradient has been kept since `mark()`: not replaced, not set to zero.

        Args:
            num_added: how often backward has added to the gradient of each parameter since. Whatever else
                was done to it counts as a reset.
        """
        return any(
            self.params[index].grad is view
            and view._version - self._marks.get(index, -1) == num_added.get(index, 0)
            for index, view in self.views.items()
        )

    def _fits_no_more(self) -> bool:
        """Return whether a parameter has changed its dtype or shape since the plan was made.

        The parameters tell, not their gradients: those that exist differ by rank.
        """
        return not all(buffer.fits(self._params_of(buffer)) for buffer in self._buffers)

    def _params_of(self, buffer: FusionBuffer) -> list[Tensor]:
        return [self.params[index] for index in buffer.bucket.indices]

    # -- the plan -----------------------------------------------------------------------------------

    def _agree_on_plan(self, covered: tuple[int, ...], observed: Sequence[int], when: str) -> None:
        """Make the same plan on every rank: rank 0's order, and apart what is sparse on any rank."""
        mine = [i for i in covered if (grad := self.params[i].grad) is not None and grad.is_sparse]
        everyone: list[tuple[Sequence[int], list[int]]] = []
        self.group.lane.run(
            Operation("gradients", extra=f"new plan for {_describe(covered, len(self.params))}, {when}"),
            lambda: everyone.extend(self.group.lane.wire.all_gather_object((observed, mine))),
        )
        self._sparse = {index for _, sparse in everyone for index in sparse}.union(self._sparse)
        self._sparse.intersection_update(covered)
        dense = set(covered) - self._sparse
        order = [i for i in launch_order(len(self.params), everyone[0][0]) if i in dense]
        buckets = plan_buckets(
            [_item(i, self.params[i]) for i in sorted(dense)],
            cap_bytes=self.recipe.bucket_cap_bytes,
            order=order,
        )
        self._allocate(buckets)
        self._covered = covered
        self._plan = f"{plan_hash(buckets):016x}"

    def _allocate(self, buckets: Sequence[Bucket]) -> None:
        """Make room for the gradients: where the ranks share memory, there, to be reduced in place."""
        self._buffers, self._regions = [], []
        for bucket in buckets:
            params = [self.params[i] for i in bucket.indices]
            flat, region = self._room(num_elements(bucket), params[0].dtype)
            self._buffers.append(FusionBuffer(bucket, params, flat))
            self._regions.append(region)

    def _room(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Region | None]:
        plane = self.group.plane
        made: list[Segment | None] = []
        if plane is not None and not self.recipe.compression.changes(dtype):
            operation = Operation("gradients", dtype=dtype_name(dtype), shape=(numel,), extra="allocation")
            self.group.lane.run(operation, lambda: made.append(plane.open_segment(numel * dtype.itemsize)))
            if (segment := made[0]) is not None:
                region = plane.region(segment, numel, dtype)
                return region.mine, region
        return torch.empty(numel, dtype=dtype), None

    # -- dense gradients ----------------------------------------------------------------------------

    def _reduce_bucket(self, number: int, buffer: FusionBuffer, when: str) -> list[int]:
        """Reduce one bucket; return the parameters in it that turned out to be sparse on some rank."""
        params = self._params_of(buffer)
        buffer.absorb([p.grad for p in params])
        operation = Operation(
            "gradients",
            op=self.recipe.op.name,
            dtype=dtype_name(buffer.flat.dtype),
            shape=tuple(buffer.flat.shape),
            extra=f"bucket {number} of plan {self._plan}, {when}",
        )
        factor = self.recipe.predivide_factor
        if factor != 1.0:
            buffer.flat.div_(factor)  # before the others may look at it
        self.group.lane.run(operation, lambda: self._combine(buffer.flat, self._regions[number]))
        if factor != 1.0:
            buffer.flat.mul_(factor / self.group.size)
        sparse = buffer.sparse_somewhere()
        for place, exists in enumerate(buffer.dense_somewhere()):
            view = buffer.views[place] if exists else None
            if place not in sparse and params[place].grad is not view:
                params[place].grad = view
        return [buffer.bucket.indices[place] for place in sparse]

    def _combine(self, flat: Tensor, region: Region | None) -> None:
        """All-reduce `flat`; runs inside the lane."""
        op = self.recipe.op if self.recipe.predivide_factor == 1.0 else ReduceOp.SUM
        if region is not None:
            assert self.group.plane is not None
            self.group.plane.all_reduce_region(region, op)
            return
        wire = self.recipe.compression.compress(flat)
        reduce_flat(self.group, wire, op, choose_algorithm(self.group, "auto", wire))
        self.recipe.compression.decompress(wire, flat)

    # -- the others ---------------------------------------------------------------------------------

    def _reduce_apart(self, indices: list[int], late: set[int]) -> None:
        """Reduce what is sparse on some rank.

        The `late` ones were planned as dense: their dense parts are already summed in their views, and only
        the sparse parts are missing. The next plan knows them as sparse.
        """
        params = [self.params[i] for i in indices]
        grads = [
            None if i in late and p.grad is not None and not p.grad.is_sparse else p.grad
            for i, p in zip(indices, params, strict=True)
        ]
        reduced = reduce_sparse(params, grads, self.recipe.op, self.group)
        for index, param, total in zip(indices, params, reduced, strict=True):
            if index in late and self._was_dense_somewhere(index):
                view = self.views[index]
                param.grad = view if total is None else view.add_(total)
            else:
                param.grad = total
        if late:
            self._sparse |= late
            self._covered = None  # plan anew

    def _was_dense_somewhere(self, index: int) -> bool:
        buffer = next(buffer for buffer in self._buffers if index in buffer.bucket.indices)
        return buffer.dense_somewhere()[buffer.bucket.indices.index(index)]


def _item(index: int, param: Tensor) -> Item:
    return Item(index, param.numel(), param.element_size(), f"{dtype_name(param.dtype)}:{param.device.type}")


def _describe(covered: tuple[int, ...], total: int) -> str:
    """Say which of the parameters take part, shortly."""
    missing = sorted(set(range(total)) - set(covered))
    if not missing:
        return f"all {total} parameters"
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"{len(covered)} of {total} parameters (frozen: {listed})"
