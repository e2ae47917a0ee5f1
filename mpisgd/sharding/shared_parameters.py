"""`SharedParameters`: parameters of which a host has one copy, each part updated by the rank that owns it.

What the ranks save is the second half of an all-reduce, which would bring the results to everyone, and
(n - 1)/n of the optimizer's work and memory.
"""

import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.fusion_buffer import layout_of, window
from mpisgd.interfaces.host_transport import Segment
from mpisgd.sharding.divided_parameters import DividedParameters, Named, ParameterMemory
from mpisgd.sharding.division import Item, PieceRange, lay_out
from mpisgd.sharding.needed_parts import NeededPart
from mpisgd.transport.ipc.segment import PAGE

__all__ = ["SharedParameters", "check_shareable", "needed_of_shared"]

_moved_by: Any = WeakIdKeyDictionary()  # by parameter: who has put it where it lies now, weakly


class SharedParameters(DividedParameters):
    """Keeps the parameters of an optimizer in the shared memory of each host.

    Their values become those of each host's first rank. Where the ranks of a host cannot share memory, or a
    rank is alone on its host, they stay where they are.
    """

    one_copy = True
    _versions: int | None = None  # how often torch has seen parameters written, up to the latest step
    _is_written = False  # after that step, by the program
    _has_warned = False

    @property
    def _shares(self) -> bool:
        """Whether some ranks may share memory; the same on all of them."""
        return self._group.shares_memory

    @property
    def _may_cut(self) -> bool:
        return self._shares or self.owners.size > 1 or self._cuts_alone

    def _cuts(self, memory: ParameterMemory) -> bool:
        several = not self.owners.of_host and self.owners.size > 1
        return memory.segment is not None or several or self._cuts_alone

    def _check(self, named: Named) -> None:
        check_shareable(named)

    def _flat(self, range_: PieceRange, memory: ParameterMemory) -> Tensor:
        if memory.segment is None:
            return super()._flat(range_, memory)
        dtype = self.named[range_.members[0].param][1].dtype
        return memory.segment.share_as(0, range_.numel, dtype, start=range_.start)

    def _remaining(self, params: Sequence[Tensor]) -> Collection[int]:
        """See `DividedParameters`: all are moved."""
        return ()

    def _move(self, params: Sequence[Tensor], items: list[Item]) -> ParameterMemory:
        """Put parameters into new shared memory. Collective.

        Ranks that are alone on their host take part in what the others agree on.
        """
        if not self._shares:
            return ParameterMemory(items)
        shared: list[Tensor] = []
        segments: list[Segment] = []
        everyone_has_it: list[bool] = []
        memory = self.owners.memory

        def make_room() -> None:
            if memory is not None:
                _, _, end = lay_out(items)
                segment = memory.open_segment(max(PAGE, -(-end // memory.size)))
                segments.extend([] if segment is None else [segment])
            has_it = memory is None or bool(segments)  # the hosts may differ
            everyone_has_it.extend(self._group.queue.communicator.all_gather_object(has_it))
            for segment in segments:
                assert memory is not None
                shared.extend(_place(segment, params, items))
                segment.share(
                    memory.rank
                ).zero_()  # it comes from the NUMA node of the rank that touches it first

        def fill() -> None:
            if memory is not None and memory.rank == 0 and shared:
                torch._foreach_copy_(shared, [param.detach() for param in params])

        self.barrier("allocation", make_room)
        if not all(everyone_has_it):
            raise MemoryError("share_parameters: there is no shared memory for all parameters on some host")
        self.barrier("first values", fill)
        self.barrier("in place")
        for param, tensor in zip(params, shared, strict=bool(shared)):
            param.data = tensor
        for param in params:
            _moved_by[param] = weakref.ref(self)
        return ParameterMemory(items, segments[0] if segments else None)

    def is_loaded_once(self, group: Group) -> bool:
        """Return whether what `group` loads can be written by the first rank of each host alone."""
        return self._group.ranks == group.ranks and self.are_in_place

    def check_in_place(self) -> None:
        """See `DividedParameters`.

        On a rank that is alone on its host nothing was moved; what others have moved must be an error there,
        too.
        """
        for name, param in self.named if self._shares else ():
            if _moved_by[param]() is not self:
                raise InvalidArgument(
                    f"DistributedOptimizer: {name} is shared by the ranks of a host, and another optimizer "
                    "was made for it since, which has moved it; parameters that ranks share have one "
                    "optimizer: give each parameters of its own, or go on with the last one alone"
                )
        super().check_in_place()
        self._check_who_writes()

    def note_updated(self) -> None:
        """See `DividedParameters`: what counts writes from now on are those of the program."""
        if self._is_second:
            self._versions = self._sum_of_versions()

    def _check_who_writes(self) -> None:
        """Warn, once, where the program writes on the second rank of a host after each step: others do, too.

        What it writes once is a state that it loads.
        """
        if self._versions is None or self._has_warned:
            return
        before, self._is_written = self._is_written, self._versions != self._sum_of_versions()
        if not (before and self._is_written):
            return
        self._has_warned = True
        warnings.warn(
            "share_parameters: the program writes to parameters on more than the first rank of a host, which "
            "has one copy of them. That is fine where all write the same values, as load_state_dict does; "
            "p.mul_(0.9) multiplies once for each rank. Write on mpisgd.local_rank() == 0, between two calls "
            "of mpisgd.barrier()",
            RuntimeWarning,
            stacklevel=2,
        )

    @property
    def _is_second(self) -> bool:
        memory = self.owners.memory
        return self._shares and memory is not None and memory.rank == 1

    def _sum_of_versions(self) -> int:
        return sum(param._version for _, param in self.named)


def needed_of_shared(params: Sequence[Tensor], group: Group) -> dict[Tensor, NeededPart]:
    """Return the parts that this rank needs of values for parameters of which a host has one copy.

    Everything on the first rank of a host, nothing on the others. Other parameters are not in the result; it
    is empty if others share than those of `group`, or if a parameter is not where they share it any more.
    """
    sharers = {param: _moved_by[param]() for param in params if param in _moved_by}
    if not all(each is not None and each.is_loaded_once(group) for each in set(sharers.values())):
        return {}
    found = {}
    for param, sharer in sharers.items():
        layout, memory = layout_of(param), sharer.owners.memory
        is_first = memory is None or memory.rank == 0
        found[param] = NeededPart(layout, ((0, param.numel()),) if is_first else ())
    return found


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
