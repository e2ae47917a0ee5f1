"""`SharedParameters`: parameters of which a host has one copy, each updated by the rank that owns it.

    backward   every rank: gradients of all parameters, each combined into its owner's memory
    step       every rank: its own parameters, in the memory that all of them read
    forward    every rank: reads all of them

What the ranks save is the second half of an all-reduce, which would bring the results to everyone, and
(n - 1)/n of the optimizer's work and memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.fusion_buffer import layout_of, window
from mpisgd.sharding.absent_gradient import AbsentGradient
from mpisgd.sharding.ownership import assign
from mpisgd.transport.ipc.segment import PAGE
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["SharedParameters", "check_shareable"]

Named = Sequence[tuple[str, Tensor]]
ALIGN_BYTES = 64


class SharedParameters:
    """Keeps the parameters of an optimizer in the shared memory of each host.

    Where the ranks of a host cannot share memory, or a rank is alone on its host, every rank owns everything
    and nothing moves.

    Args:
        named: all parameters, with names; their values become those of each host's first rank.
        group: the ranks that train together.

    Attributes:
        owners: the rank of this host that owns each parameter.
    """

    def __init__(self, named: Named, group: Group) -> None:
        self.owners: list[int] = []
        self._group = group
        self._memory = group.transports.memory
        self._rank = 0 if self._memory is None else self._memory.rank
        self._loads = [0] * (1 if self._memory is None else self._memory.size)
        self._named: list[tuple[str, Tensor]] = []
        self._addresses: list[int] = []
        self._absent: list[tuple[Tensor, AbsentGradient]] = []
        self._are_with_owners = False
        self._others: set[int] = set()  # ids of the parameters that other ranks own
        self.extend(named)

    @property
    def divided(self) -> bool:
        """Whether ranks of this host share the work."""
        return len(self._loads) > 1

    def extend(self, named: Named) -> None:
        """Take over a list that has grown at its end. Collective.

        Raises:
            UnsupportedTensor, InvalidArgument: found before anything is moved.
        """
        new = named[len(self._named) :]
        check_shareable(named)
        owners = assign([param.nbytes for _, param in new], self._loads)
        if new and (self._group.shm is not None or self._group.internode is not None):
            self._move([param for _, param in new], owners)
        for (name, param), owner in zip(new, owners, strict=True):
            self._loads[owner] += param.nbytes
            if owner != self._rank:
                self._absent.append((param, AbsentGradient(param, self._why(name, owner))))
                self._others.add(id(param))
        self._named += new
        self.owners += owners
        self._addresses += [param.data_ptr() for _, param in new]

    @property
    def group_ranks(self) -> list[int]:
        """The rank within the group of each parameter's owner on this host."""
        topology = self._group.known_topology
        here = topology.nodes[topology.node_rank] if self._memory is not None else (self._group.rank,)
        return [here[owner] for owner in self.owners]

    def _why(self, name: str, owner: int) -> str:
        topology = self._group.known_topology
        rank = self._group.ranks[topology.nodes[topology.node_rank][owner]]
        return (
            f"the gradient of {name} is on rank {rank} alone, which updates this parameter for its host "
            "(share_parameters=True). Clip by optimizer.clip_grad_norm_(), reset by optimizer.zero_grad() "
            "before the next backward(), and accumulate inside optimizer.no_sync()"
        )

    # -- where the parameters lie -------------------------------------------------------------------

    def _move(self, params: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Put parameters into new shared memory, each into the share of its owner. Collective.

        Ranks that are alone on their host take part in what the others agree on.
        """
        shared: list[Tensor] = []

        def make_room() -> None:
            if self._memory is not None:
                shared.extend(_allocate(self._memory, params, owners))
            for tensor, owner in zip(shared, owners, strict=bool(shared)):
                if owner == self._rank:
                    tensor.zero_()  # memory is on the NUMA node of the rank that touches it first

        def fill() -> None:
            if self._rank == 0 and shared:
                torch._foreach_copy_(shared, [param.detach() for param in params])

        self.barrier("allocation", make_room)
        if self._memory is not None and not shared:
            raise MemoryError("share_parameters: there is no shared memory for all parameters")
        self.barrier("first values", fill)
        self.barrier("in place")
        for param, tensor in zip(params, shared, strict=bool(shared)):
            param.data = tensor

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

    # -- a step -------------------------------------------------------------------------------------

    def owns(self, param: Tensor) -> bool:
        """Return whether this rank updates a parameter."""
        return id(param) not in self._others

    def own_of(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return those of some parameters that this rank updates."""
        return [param for param in params if id(param) not in self._others]  # every step asks for hundreds

    def leave_gradients_with_owners(self) -> None:
        """Leave the reduced gradients with their owners; the others have none."""
        self._are_with_owners = True
        for param, absent in self._absent:
            if param.grad is not None:
                param.grad = absent

    def drop_absent_gradients(self) -> None:
        """Forget the gradients of what others own: those that are with them, and what was not reduced."""
        self._are_with_owners = False
        for param, _ in self._absent:
            param.grad = None

    def gradients_are_with_owners(self, holds_own: Callable[[], bool]) -> bool:
        """Return whether reduced gradients are with their owners; the same on every rank.

        Args:
            holds_own: tells whether this rank has some of its own; it may own all that there are.
        """
        if self._are_with_owners:  # every backward asks
            self._are_with_owners = any(param.grad is absent for param, absent in self._absent) or holds_own()
        return self._are_with_owners

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


def _allocate(memory: ShmTransport, params: Sequence[Tensor], owners: Sequence[int]) -> list[Tensor]:
    """Return a tensor for each parameter in shared memory, laid out as it is; none where there is no room.

    Collective over the host.
    """
    starts, ends = [], [0] * memory.size  # in the share of the owner, in bytes
    for param, owner in zip(params, owners, strict=True):
        starts.append(ends[owner])
        ends[owner] += -(-param.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    segment = memory.open_segment(max(PAGE, *ends))
    if segment is None:
        return []
    return [
        window(segment.share_as(owner, param.numel(), param.dtype, start=start), 0, layout_of(param))
        for param, owner, start in zip(params, owners, starts, strict=True)
    ]
