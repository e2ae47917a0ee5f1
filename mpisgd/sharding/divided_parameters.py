"""`DividedParameters`: which rank updates which part of every parameter, and the parts of this rank.

What a step is:

    backward   every rank: gradients of all parameters, each part combined for its owner
    step       every rank: its own pieces
    forward    every rank: reads all of them
"""

import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES, on_host
from mpisgd.accelerator.host_copy import prefetch_to_host
from mpisgd.accelerator.runtime import on_device
from mpisgd.core.consistency import Operation
from mpisgd.dtypes import dtype_name
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.fusion_buffer import StridedLayout, flat_view, layout_of
from mpisgd.interfaces.host_transport import Segment
from mpisgd.sharding.division import Item, Member, PieceRange, divide, lay_out
from mpisgd.sharding.elementwise import counts_on_device, may_join
from mpisgd.sharding.flat_blocks import Block, is_movable, move_to_blocks
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.piece import Piece, Receiver
from mpisgd.sharding.update_work import UpdateWork
from mpisgd.transport.staging_layout import slot_bytes

__all__ = ["DividedParameters", "Groups", "Named", "ParameterMemory", "check_divisible"]

# Of parameters whose master is in host memory: while one piece is updated, the gradient of another comes, and
# what was updated before goes back.
OFFLOADED_BYTES = 4 * 2**20

Named = Sequence[tuple[str, Tensor]]
Groups = Sequence[Mapping[str, Any]]


class ParameterMemory(NamedTuple):
    """Parameters that came together.

    Attributes:
        items: what is to be known of each.
        segment: the shared memory in which all of them lie, if they do.
        blocks: the memory of those that were moved to lie beside others, by their indices.
    """

    items: list[Item]
    segment: Segment | None = None
    blocks: Mapping[int, Block] = MappingProxyType({})


class DividedParameters:
    """Divides the parameters of an optimizer among ranks, each of which has all of them in its own memory.

    Large ones stay where they are.

    Args:
        named: all parameters, with names.
        groups: the optimizer's groups.
        owners: the ranks that divide them.
        elementwise: whether the optimizer updates each element by itself, so that pieces may be cut anywhere.
        joins: whether small parameters are neighbours in memory, and may be one piece; their gradients then
            come together, too.
        master_dtype: that of the copies that the optimizer updates, of parameters of less precision.
        cuts_alone: whether a single owner, too, has parts of parameters and not whole ones.
        work_of: what an update of a parameter as a whole takes, None where that is not known; of an
            elementwise optimizer, those for which it is known are not cut.
        masters_on_host: whether the optimizer updates copies in host memory, of parameters on a device.
        keeps_masters: whether it updates copies anyway, of what may be written to parameters as something
            near to them.
        most_bytes: of a piece on a CPU that is no whole parameter.

    Attributes:
        owners: as given.
        named: as given, and kept up to date.
        ranges: what each of them owns.
        pieces: what this rank owns, in memory.
        layouts: how each parameter lies in memory.
        buckets: parameters that are divided together, by their indices; others may be in none.
        one_copy: whether the ranks of a host have the parameters in the same memory.
    """

    one_copy = False

    def __init__(
        self,
        named: Named,
        groups: Groups,
        owners: Owners,
        *,
        elementwise: bool,
        joins: bool = False,
        master_dtype: torch.dtype | None = None,
        cuts_alone: bool = False,
        masters_on_host: bool = False,
        keeps_masters: bool = False,
        work_of: UpdateWork = lambda param, options: None,
        most_bytes: int = sys.maxsize,
    ) -> None:
        self.owners = owners
        self._group = owners.group
        self._options = groups
        self._masters_on_host = masters_on_host
        self._keeps_masters = keeps_masters
        self._elementwise = elementwise
        self._joins = joins
        self._master_dtype = master_dtype
        self._cuts_alone = cuts_alone
        self._work_of = work_of
        self._most_bytes = most_bytes
        self.named: list[tuple[str, Tensor]] = []
        self._addresses: list[int] = []
        self._memories: list[ParameterMemory] = []
        self._memory_of: list[ParameterMemory] = []
        self._whole: set[int] = set()
        self.buckets: list[tuple[int, ...]] = []
        self.layouts: list[StridedLayout] = []
        self.ranges: list[list[PieceRange]] = [[] for _ in range(owners.size)]
        self.pieces: list[Piece] = []
        self.extend(named, groups)

    @property
    def divided(self) -> bool:
        """Whether the optimizer sees anything else than the parameters."""
        return self.owners.size > 1 or self.has_masters

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates copies; the same on all ranks."""
        return any(map(self._takes_master, (param for _, param in self.named)))

    @property
    def has_wider_masters(self) -> bool:
        """Whether copies are where parameters are not, or have more precision; the same on all ranks."""
        wider = (self._dtype_of_master(param) != param.dtype for _, param in self.named)
        return self._masters_on_host or any(wider)

    def _takes_master(self, param: Tensor) -> bool:
        return self._keeps_masters or self._masters_on_host or self._dtype_of_master(param) != param.dtype

    def _dtype_of_master(self, param: Tensor) -> torch.dtype:
        master = self._master_dtype
        if master is None or not param.is_floating_point() or param.dtype.itemsize >= master.itemsize:
            return param.dtype
        return master

    def placed(self, piece: Piece, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a piece with its tensors where the optimizer would have put them."""
        return piece.placed(entries, counters_too=counts_on_device(self._options[piece.group]))

    def itemsize(self, index: int) -> int:
        """Return the bytes of an element of a parameter."""
        return self.named[index][1].element_size()

    def part(self, member: Member) -> Tensor:
        """Return the memory of a part of a parameter, [member.numel]."""
        flat = flat_view(self.named[member.param][1], self.layouts[member.param])
        return flat[member.first : member.first + member.numel]

    def extend(self, named: Named, groups: Groups) -> None:
        """Take over a list that has grown at its end. Collective.

        Raises:
            UnsupportedTensor, InvalidArgument: found before anything is moved.
        """
        first = len(self.named)
        new = [param for _, param in named[first:]]
        self._check(named)
        of_group = [place for place, options in enumerate(groups) for _ in options["params"]]
        alone = self._remaining(new)
        items = [
            self._item(i, param, of_group[i], groups[of_group[i]], alone=i - first in alone)
            for i, param in enumerate(new, first)
        ]
        self._whole.update(item.param for item in items if item.work is not None)
        self.layouts += [layout_of(param) for param in new]
        self.named, self._options = list(named), groups
        memory = self._move(new, items) if new else ParameterMemory(items)
        self._memories.append(memory)
        self._memory_of += [memory] * len(new)
        self._addresses += [param.data_ptr() for param in new]
        self._add(memory)

    def _check(self, named: Named) -> None:
        """Raise unless all parameters can be divided."""
        check_divisible(named)

    def _remaining(self, params: Sequence[Tensor]) -> Collection[int]:
        """Return the places of those that must not be moved, the same on all ranks. Collective."""
        if not self._joins:
            return ()
        mine = [place for place, param in enumerate(params) if not is_movable(param)]
        everyones: list[Sequence[int]] = []
        self._group.queue.run(
            Operation("shards of parameters", extra="which of them stay"),
            lambda: everyones.extend(self._group.queue.communicator.all_gather_object(mine)),
        )
        return frozenset().union(*everyones)

    def _move(self, params: Sequence[Tensor], items: list[Item]) -> ParameterMemory:
        """Put parameters where they are to lie. Collective."""
        return ParameterMemory(items, blocks=move_to_blocks(params, items) if self._joins else {})

    def _item(
        self, index: int, param: Tensor, group: int, options: Mapping[str, Any], *, alone: bool
    ) -> Item:
        joins = self._joins and not alone and param.nbytes < ALONE_BYTES and may_join(options, param.dtype)
        kind = (group, dtype_name(param.dtype), not joins)
        work = self._work_of(param, options)
        return Item(index, param.numel(), param.element_size(), kind, work)

    def leave_memory(self) -> None:
        """Give each parameter that was moved memory of its own again."""
        for index, ((_, param), memory) in enumerate(zip(self.named, self._memory_of, strict=True)):
            if memory.segment is not None or index in memory.blocks:
                param.data = param.detach().clone()

    @property
    def order(self) -> list[int] | None:
        """The parameters in the order of memory, if pieces join neighbours there; otherwise None."""
        if not self._joins:
            return None
        return [item.param for memory in self._memories for item in lay_out(memory.items)[0]]

    # -- who owns what ------------------------------------------------------------------------------

    def may_keep_whole(self, indices: Collection[int]) -> bool:
        """Return whether `keep_whole` would change something on some rank; the same on all of them."""
        return self._elementwise and self._may_cut and not self._whole.issuperset(indices)

    @property
    def _may_cut(self) -> bool:
        """Whether some rank may have parts of parameters; the same on all of them."""
        return self.owners.size > 1 or self._cuts_alone

    def keep_whole(self, indices: Collection[int]) -> Sequence[Sequence[PieceRange]]:
        """Let one rank own all of each of these parameters, for good; return `ranges`. Pieces are others."""
        self._whole.update(indices)
        return self._divide_again()

    def is_divided_by(self, buckets: Sequence[tuple[int, ...]]) -> bool:
        """Return whether `divide_by` would change nothing; the same on all ranks."""
        return self.buckets == list(buckets)

    def divide_by(self, buckets: Sequence[tuple[int, ...]]) -> Sequence[Sequence[PieceRange]]:
        """Divide the parameters of each bucket by themselves; return `ranges`. Pieces are others then."""
        self.buckets = list(buckets)
        return self._divide_again()

    def _divide_again(self) -> Sequence[Sequence[PieceRange]]:
        self.ranges = [[] for _ in range(self.owners.size)]
        self.pieces = []
        for memory in self._memories:
            self._add(memory)
        return self.ranges

    def _add(self, memory: ParameterMemory) -> None:
        """Divide the parameters of a memory among the ranks."""
        cuts = self._elementwise and self._cuts(memory)
        whole = self._whole if cuts else range(len(self.named))
        new = divide(memory.items, whole, self.owners.size, self._piece_bytes, self.buckets)
        for of_rank, more in zip(self.ranges, new, strict=True):
            of_rank += more
        of_group = {item.param: item.kind[0] for item in memory.items}
        self.pieces += [
            self._piece(range_, of_group[range_.members[0].param], memory if cuts else None)
            for range_ in new[self.owners.rank]
        ]

    def _cuts(self, memory: ParameterMemory) -> bool:
        """Return whether pieces of this memory may be parts of parameters."""
        return self._may_cut

    @property
    def _piece_bytes(self) -> int:
        """Most bytes of a piece that is no whole parameter: what is combined and updated in the cache.

        A device has no use for small ones.
        """
        if self._masters_on_host:
            return OFFLOADED_BYTES
        if any(on_device(param) for _, param in self.named):
            return sys.maxsize
        return min(self._most_bytes, slot_bytes(max(map(len, self.owners.nodes))))

    def _piece(self, range_: PieceRange, group: int, memory: ParameterMemory | None) -> Piece:
        index, param = range_.members[0].param, self.named[range_.members[0].param][1]
        if memory is None or index in self._whole or not param.numel():
            tensor, layout = param, self.layouts[index]
        else:
            tensor, layout = torch.nn.Parameter(self._flat(range_, memory)), None
        if not self._takes_master(param):
            return Piece(tensor, group, range_.members, layout)
        target, offloaded = tensor.detach(), self._masters_on_host
        source = on_host(target) if offloaded else target
        master = torch.nn.Parameter(source.to(self._dtype_of_master(param), copy=True))
        written = target.clone() if self._keeps_masters else None
        return Piece(master, group, range_.members, layout, target, is_offloaded=offloaded, written=written)

    def _flat(self, range_: PieceRange, memory: ParameterMemory) -> Tensor:
        """Return the memory of a piece that is no whole parameter."""
        if len(range_.members) == 1:
            return self.part(range_.members[0])
        return memory.blocks[range_.members[0].param].part(range_)

    def tensors_in(self, range_: PieceRange, wanted: Container[int]) -> list[Tensor]:
        """Return the memory of the parts of some parameters that lie in a range, neighbours as one."""
        members = [member for member in range_.members if member.param in wanted]
        if 1 < len(members) == len(range_.members):
            return [self._flat(range_, self._memory_of[members[0].param])]
        return [self.part(member) for member in members]

    # -- around a step ------------------------------------------------------------------------------

    def hand_over(self, receiver: Receiver) -> None:
        """See `Pieces`; one after the other as the gradients come from a device."""
        found = [(piece, piece.grad) for piece in self.pieces if piece.grad is not None]
        grads = prefetch_to_host([grad for _, grad in found], self._group.streams)
        for (piece, _), grad in zip(found, grads, strict=True):
            receiver.received(piece, grad)
        receiver.finish()

    @property
    def are_in_place(self) -> bool:
        """Whether the parameters still lie where they were when they were divided."""
        return [param.data_ptr() for _, param in self.named] == self._addresses

    def check_in_place(self) -> None:
        """Raise unless the parameters still lie where they were when they were divided.

        Raises:
            InvalidArgument: names one that the program has moved, as `model.half()` does.
        """
        if self.are_in_place:
            return
        for (name, param), address in zip(self.named, self._addresses, strict=True):
            if param.data_ptr() != address:
                raise InvalidArgument(
                    f"DistributedOptimizer: {name} is no longer where it was when the parameters were "
                    "divided among the ranks; convert and move the model before the optimizer is wrapped, "
                    "and write to parameters in place (param.copy_) instead of giving them other memory "
                    "(param.data = ...)"
                )

    def note_updated(self) -> None:
        """Note that a step has updated the parameters; called at its end."""

    def barrier(self, what: str, then: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have come here, and do something then. Collective.

        Args:
            what: the state of the parameters by then.
            then: the action.
        """
        self._group.queue.run(Operation("shared parameters", extra=what), then)


def check_divisible(named: Named) -> None:
    """Raise unless parts of all parameters can be updated where they lie.

    Raises:
        UnsupportedTensor: one is neither on the CPU nor on a GPU, or not dense, or they are not together.
        InvalidArgument: one is a view with gaps.
    """
    for name, param in named:
        if not (param.is_cpu or on_device(param)) or param.layout is not torch.strided:
            where = f"on {param.device}, {param.layout}"
            raise UnsupportedTensor(
                f"Sharded: {name} is {where}; dense parameters on the CPU or a GPU can be divided"
            )
        if param.device != named[0][1].device:
            other, device = named[0][0], named[0][1].device
            raise UnsupportedTensor(
                f"Sharded: {name} is on {param.device} and {other} on {device}; all are to be on one device"
            )
        if param.numel() and param.stride() != layout_of(param).stride:
            raise InvalidArgument(
                f"Sharded: {name} has the strides {param.stride()}, which leave gaps in memory; make it "
                "contiguous before the optimizer is wrapped"
            )
