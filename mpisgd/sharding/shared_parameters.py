"""`SharedParameters`: parameters of which a host has one copy, each part updated by the rank that owns it.

    backward   every rank: gradients of all parameters, each part combined for its owner
    step       every rank: its own pieces, in the memory that all of them read
    forward    every rank: reads all of them

What the ranks save is the second half of an all-reduce, which would bring the results to everyone, and
(n - 1)/n of the optimizer's work and memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import dtype_name
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.fusion_buffer import Layout, layout_of, window
from mpisgd.sharding.division import Item, PieceRange, divide, lay_out
from mpisgd.sharding.elementwise import may_join
from mpisgd.sharding.piece import Piece
from mpisgd.transport.ipc.segment import PAGE, Segment
from mpisgd.transport.shm.reduction import slot_bytes

__all__ = ["SharedParameters", "check_shareable"]

Named = Sequence[tuple[str, Tensor]]
Groups = Sequence[Mapping[str, Any]]


class _Memory(NamedTuple):
    """Parameters that were put into shared memory together; no segment where they stayed where they were."""

    items: list[Item]
    segment: Segment | None


class SharedParameters:
    """Keeps the parameters of an optimizer in the shared memory of each host.

    Where the ranks of a host cannot share memory, or a rank is alone on its host, every rank owns everything
    and nothing moves.

    Args:
        named: all parameters, with names; their values become those of each host's first rank.
        groups: the optimizer's groups.
        group: the ranks that train together.
        elementwise: whether the optimizer updates each element by itself, so that pieces may be cut anywhere.

    Attributes:
        ranges: what each rank of this host owns.
        pieces: what this rank owns, in memory.
        layouts: how each parameter lies in memory.
    """

    def __init__(self, named: Named, groups: Groups, group: Group, *, elementwise: bool) -> None:
        self._group = group
        self._memory = group.transports.memory
        self._rank = 0 if self._memory is None else self._memory.rank
        self._size = 1 if self._memory is None else self._memory.size
        self._elementwise = elementwise
        self._named: list[tuple[str, Tensor]] = []
        self._addresses: list[int] = []
        self._memories: list[_Memory] = []
        self._whole: set[int] = set()
        self.layouts: list[Layout] = []
        self.ranges: list[list[PieceRange]] = [[] for _ in range(self._size)]
        self.pieces: list[Piece] = []
        self.extend(named, groups)

    @property
    def divided(self) -> bool:
        """Whether ranks of this host share the work."""
        return self._size > 1

    @property
    def owners(self) -> Sequence[int]:
        """The ranks of the group, all on one host, that own everything between them."""
        shares = self._group.shm is not None or self._group.internode is not None
        return self._group.known_topology.nodes[0] if shares else (0,)

    def itemsize(self, index: int) -> int:
        """Return the bytes of an element of a parameter."""
        return self._named[index][1].element_size()

    def extend(self, named: Named, groups: Groups) -> None:
        """Take over a list that has grown at its end. Collective.

        Raises:
            UnsupportedTensor, InvalidArgument: found before anything is moved.
        """
        first = len(self._named)
        new = [param for _, param in named[first:]]
        check_shareable(named)
        of_group = [place for place, options in enumerate(groups) for _ in options["params"]]
        items = [_item(i, param, of_group[i], groups[of_group[i]]) for i, param in enumerate(new, first)]
        self.layouts += [layout_of(param) for param in new]
        self._named = list(named)
        moves = new and (self._group.shm is not None or self._group.internode is not None)
        memory = _Memory(items, self._move(new, items) if moves else None)
        self._memories.append(memory)
        self._addresses += [param.data_ptr() for param in new]
        self._add(memory)

    @property
    def order(self) -> list[int]:
        """The parameters in the order in which they lie in memory."""
        return [item.param for memory in self._memories for item in lay_out(memory.items)[0]]

    def may_keep_whole(self, indices: Collection[int]) -> bool:
        """Return whether `keep_whole` would change something on some rank; the same on all of them."""
        shares = self._group.shm is not None or self._group.internode is not None
        return self._elementwise and shares and not self._whole.issuperset(indices)

    def keep_whole(self, indices: Collection[int]) -> None:
        """Let one rank own all of each of these parameters, for good. Pieces are others then."""
        self._whole.update(indices)
        self.ranges = [[] for _ in range(self._size)]
        self.pieces = []
        for memory in self._memories:
            self._add(memory)

    def _add(self, memory: _Memory) -> None:
        """Divide the parameters of a memory among the ranks."""
        cuts = self._elementwise and memory.segment is not None
        whole = self._whole if cuts else range(len(self._named))
        new = divide(memory.items, whole, self._size, slot_bytes(self._size))
        for of_rank, more in zip(self.ranges, new, strict=True):
            of_rank += more
        of_group = {item.param: item.kind[0] for item in memory.items}
        self.pieces += [
            self._piece(range_, of_group[range_.members[0].param], memory.segment if cuts else None)
            for range_ in new[self._rank]
        ]

    def _piece(self, range_: PieceRange, group: int, segment: Segment | None) -> Piece:
        index, param = range_.members[0].param, self._named[range_.members[0].param][1]
        if segment is None or index in self._whole or not param.numel():
            return Piece(param, group, range_.members, self.layouts[index])
        flat = segment.share_as(0, range_.numel, param.dtype, start=range_.start)
        return Piece(torch.nn.Parameter(flat), group, range_.members)

    # -- where the parameters lie -------------------------------------------------------------------

    def _move(self, params: Sequence[Tensor], items: Sequence[Item]) -> Segment | None:
        """Put parameters into new shared memory. Collective.

        Ranks that are alone on their host take part in what the others agree on.
        """
        shared: list[Tensor] = []
        segments: list[Segment] = []

        def make_room() -> None:
            if self._memory is not None:
                _, _, end = lay_out(items)
                segment = self._memory.open_segment(max(PAGE, -(-end // self._size)))
                segments.extend([] if segment is None else [segment])
            for segment in segments:
                shared.extend(_place(segment, params, items))
                segment.share(
                    self._rank
                ).zero_()  # it comes from the NUMA node of the rank that touches it first

        def fill() -> None:
            if self._rank == 0 and shared:
                torch._foreach_copy_(shared, [param.detach() for param in params])

        self.barrier("allocation", make_room)
        if self._memory is not None and not segments:
            raise MemoryError("share_parameters: there is no shared memory for all parameters")
        self.barrier("first values", fill)
        self.barrier("in place")
        for param, tensor in zip(params, shared, strict=bool(shared)):
            param.data = tensor
        return segments[0] if segments else None

    def check_in_place(self) -> None:
        """Raise unless the parameters still lie where they were put.

        Raises:
            InvalidArgument: names one that the program has moved, as `model.half()` does.
        """
        if [param.data_ptr() for _, param in self._named] == self._addresses:
            return
        for (name, param), address in zip(self._named, self._addresses, strict=True):
            if param.data_ptr() != address:
                raise InvalidArgument(
                    f"DistributedOptimizer: {name} is no longer where share_parameters=True has put it; "
                    "convert and move the model before the optimizer is wrapped, and write to parameters in "
                    "place (param.copy_) instead of giving them other memory (param.data = ...)"
                )

    def barrier(self, what: str, then: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have come here, and do something then. Collective.

        Args:
            what: the state of the parameters by then.
            then: the action.
        """
        self._group.queue.run(Operation("shared parameters", extra=what), then)


def check_shareable(named: Named) -> None:
    """Raise unless all parameters can be moved to memory of their own.

    Raises:
        UnsupportedTensor: one is on a GPU, or not dense.
        InvalidArgument: two share memory.
    """
    seen: dict[int, str] = {}
    for name, param in named:
        if not param.is_cpu or param.layout is not torch.strided:
            where = f"on {param.device}, {param.layout}"
            raise UnsupportedTensor(
                f"share_parameters: {name} is {where}; dense parameters on the CPU can be shared by a host"
            )
        storage = param.untyped_storage()
        if storage.nbytes() and (other := seen.setdefault(storage.data_ptr(), name)) != name:
            raise InvalidArgument(
                f"share_parameters: {name} lies in the memory of {other}, and each gets memory of its own; "
                "tie weights by using one Parameter twice"
            )


def _item(index: int, param: Tensor, group: int, options: Mapping[str, Any]) -> Item:
    has_own = param.nbytes >= ALONE_BYTES or not may_join(options, param.dtype)
    kind = (group, dtype_name(param.dtype), has_own)
    return Item(index, param.numel(), param.element_size(), kind)


def _place(segment: Segment, params: Sequence[Tensor], items: Sequence[Item]) -> list[Tensor]:
    """Return a tensor for each parameter in the segment, laid out as it is."""
    ordered, starts, _ = lay_out(items)
    start_of = {item.param: start for item, start in zip(ordered, starts, strict=True)}
    return [
        window(
            segment.share_as(0, param.numel(), param.dtype, start=start_of[item.param]), 0, layout_of(param)
        )
        for param, item in zip(params, items, strict=True)
    ]
