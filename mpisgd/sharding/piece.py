"""`Piece`: memory that this rank updates, as the optimizer sees it during a step.

A piece of an elementwise optimizer is a flat tensor in the memory of the parameters; what the optimizer keeps
for it is cut and joined element by element. Another one's piece is a parameter itself.

With mixed precision the optimizer sees a copy of a higher precision, the master, which is what it updates:

    gradient (bfloat16)  ->  master.grad (float32)  ->  master (float32)  ->  parameter (bfloat16)

An offloaded piece has its master, and so its state, in host memory, and its parameter on a device. Those of a
rank, wherever they lie, are `Pieces`.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import on_host, round_to_device
from mpisgd.collectives.objects import Allocate
from mpisgd.gradients.fusion_buffer import StridedLayout, flat_view, window
from mpisgd.sharding.division import Member
from mpisgd.sharding.needed_parts import LoadedPart
from mpisgd.sharding.owners import Owners

__all__ = [
    "MASTER",
    "WRITTEN",
    "Entries",
    "Piece",
    "PieceState",
    "Pieces",
    "Receiver",
    "is_elementwise_entry",
    "join_states",
]

Entries = Mapping[str, Any]  # the state of one tensor

WRITTEN = "written"  # and the one that is the parameter as it was written last, see `Piece`
MASTER = "master"  # the entry that is the parameter itself, in the precision in which it is updated

MOST_NAMED = 3  # members in the name of a piece

# Of torch's optimizers; a parameter without dimensions has an average of the same shape.
COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})


def is_elementwise_entry(key: str, value: Any, shape: torch.Size) -> bool:
    """Return whether a state's entry has a number for each element of a parameter of this shape."""
    is_tensor = isinstance(value, Tensor | LoadedPart)
    return is_tensor and value.shape == shape and (bool(shape) or key not in COUNTERS)


class PieceState(NamedTuple):
    """What an optimizer keeps for the part of a parameter that lies in a piece.

    Attributes:
        member: the part.
        cut: the entries that have a number for each element, [member.numel].
        kept: the others; those of a whole parameter are all here.
    """

    member: Member
    cut: dict[str, Tensor]
    kept: dict[str, Any]


class Piece:
    """One piece of this rank.

    Attributes:
        tensor: what the optimizer updates: [numel], or a parameter, or the master of one of both.
        group: the place of its group in the optimizer's.
        members: what lies in it.
        layout: how the gradient lies in memory where `tensor` has a parameter's shape, None for a flat piece.
        target: the parameter's memory, where `tensor` is a master.
        is_offloaded: whether the master is in host memory, and the parameter on a device.
        written: what `target` was when it was written last, where that is something else than the rounded
            master: what others have of it, which travels as codes. None: it is the rounded master.
        grad: the reduced gradient, [numel] in the order of memory, or sparse, where there is one.
    """

    def __init__(
        self,
        tensor: Tensor,
        group: int,
        members: Sequence[Member],
        layout: StridedLayout | None = None,
        target: Tensor | None = None,
        *,
        is_offloaded: bool = False,
        written: Tensor | None = None,
    ) -> None:
        self.written = written
        self.tensor = tensor
        self.group = group
        self.members = tuple(members)
        self.layout = layout
        self.target = target
        self.is_offloaded = is_offloaded
        self.grad: Tensor | None = None

    def name(self, names: Sequence[str]) -> str:
        """Return which parts of which parameters it is, such as `weight[0:512]+bias[0:64]`.

        Of many, the first and the last: `a[0:64]+...+z[0:64]`.

        Args:
            names: of all parameters.
        """
        parts = [f"{names[m.param]}[{m.first}:{m.first + m.numel}]" for m in self.members]
        return "+".join(parts if len(parts) <= MOST_NAMED else [parts[0], "...", parts[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, and of their gradients."""
        return (self.tensor if self.target is None else self.target).dtype

    def show_grad(self) -> None:
        """Let the optimizer see the reduced gradient."""
        grad = self.grad
        if grad is not None and self.layout is not None and not grad.is_sparse:
            grad = grad.as_strided(*self.layout, grad.storage_offset())
        self.tensor.grad = None if grad is None else grad.to(self.tensor.device, self.tensor.dtype)

    def note_written(self) -> None:
        """Note that the parameter is what others have, and not what the program has written."""
        if self.written is not None:
            assert self.target is not None
            self.written.copy_(self.target)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master to the parameters, where there is one."""
        if self.is_offloaded and self.target is not None:
            round_to_device(self.tensor, self.target)
        elif self.target is not None:
            self.target.copy_(self.tensor)

    def split(self, keys: Sequence[Hashable]) -> "list[Piece]":
        """Return pieces that together are this one, each of neighbours with one key."""
        starts = [0] + [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]
        if len(starts) < 2:
            return [self]
        bounds = itertools.pairwise([*starts, len(keys)])
        return [self._part(self.members[first:last]) for first, last in bounds]

    def _part(self, members: Sequence[Member]) -> "Piece":
        begin, end = members[0].at, members[-1].at + members[-1].numel
        tensor = torch.nn.Parameter(self.tensor.detach()[begin:end])
        target = None if self.target is None else self.target[begin:end]
        moved = [member._replace(at=member.at - begin) for member in members]
        written = None if self.written is None else self.written[begin:end]
        part = Piece(
            tensor, self.group, moved, target=target, is_offloaded=self.is_offloaded, written=written
        )
        part.grad = None if self.grad is None else self.grad[begin:end]
        return part

    # -- what the optimizer keeps for it -------------------------------------------------------------

    def with_master(self, entries: Entries) -> Entries:
        """Return the state of this piece with its master, where that says more than the parameter."""
        if self.written is not None:
            return {**entries, MASTER: self.tensor.detach(), WRITTEN: self.written}
        if self.target is None or self.target.dtype == self.tensor.dtype:
            return entries
        return {**entries, MASTER: self.tensor.detach()}

    def without_master(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Take the master out of the state of this piece, and return the rest in its precision."""
        if self.target is None:
            return entries
        master = entries.pop(MASTER, None)
        if master is not None:
            self.tensor.detach().copy_(master)
        written = None if self.written is None else entries.pop(WRITTEN, None)
        if self.written is not None and written is not None:
            self.written.copy_(written)
        shape, dtype = self.tensor.shape, self.tensor.dtype
        return {
            key: value.to(self.tensor.device, dtype)
            if is_elementwise_entry(key, value, shape) and value.is_floating_point()
            else value
            for key, value in entries.items()
        }

    def placed(self, entries: Entries, *, counters_too: bool) -> dict[str, Any]:
        """Return a state with its tensors where `tensor` lies; counters on the CPU, or there, too."""
        cpu = torch.device("cpu")
        return {
            key: value.to(cpu if key in COUNTERS and not counters_too else self.tensor.device)
            if isinstance(value, Tensor)
            else value
            for key, value in entries.items()
        }

    def cut_entries(self, entries: Entries, part: "Piece") -> dict[str, Any]:
        """Return the state of a part of this piece, which `split` has made."""
        begin = (part.tensor.data_ptr() - self.tensor.data_ptr()) // self.tensor.element_size()
        shape = self.tensor.shape
        return {
            key: value[begin : begin + part.tensor.numel()]
            if is_elementwise_entry(key, value, shape)
            else _own(value)
            for key, value in entries.items()
        }

    def states(self, entries: Entries) -> list[PieceState]:
        """Return the state of this piece by parameter."""
        if self.layout is not None:
            return [PieceState(self.members[0], {}, dict(entries))]
        shape = self.tensor.shape
        elementwise = {k: v for k, v in entries.items() if is_elementwise_entry(k, v, shape)}
        kept = {k: v for k, v in entries.items() if k not in elementwise}
        return [
            PieceState(m, {k: v[m.at : m.at + m.numel] for k, v in elementwise.items()}, kept)
            for m in self.members
        ]

    def joined(self, states: Sequence[PieceState]) -> dict[str, Any]:
        """Return the state of this piece, of those of its members, which have the same `kept`."""
        entries = {key: _own(value) for key, value in states[0].kept.items()}
        for key, value in states[0].cut.items():
            entries[key] = torch.zeros(self.tensor.shape, dtype=value.dtype, device=self.tensor.device)
            for state in states:
                at, numel = state.member.at, state.member.numel
                part = on_host(state.cut[key]) if self.is_offloaded else state.cut[key]
                entries[key][at : at + numel] = part
        return entries


class Receiver(Protocol):
    """Takes combined gradients.

    Attributes:
        in_place: whether `buffer_for` may be the memory in which the gradient of this rank lies.
    """

    in_place: bool

    def buffer_for(self, piece: Piece, mine: Tensor | None) -> Tensor:
        """Return [numel] for the gradient of a piece; `mine` is this rank's, if it lies in one piece."""

    def received(self, piece: Piece, grad: Tensor) -> None:
        """Take the gradient of a piece, which is complete."""

    def finish(self) -> None:
        """Note that there are no more, or that those before are about to leave the memory."""


class Pieces(Protocol):
    """The pieces of a rank.

    Attributes:
        owners: the ranks that have them all.
        pieces: of this rank.
        layouts: how each parameter lies in memory.
    """

    owners: Owners
    pieces: list[Piece]
    layouts: list[StridedLayout]

    @property
    def divided(self) -> bool:
        """Whether the optimizer sees anything else than the parameters."""

    def placed(self, piece: Piece, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a piece with its tensors where the optimizer would have put them."""

    def hand_over(self, receiver: Receiver) -> None:
        """Give all pieces that have a gradient, one after the other; each is in memory until `finish`."""


def join_states(states: Sequence[PieceState], layout: StridedLayout, empty: Allocate) -> dict[str, Any]:
    """Return the state of a parameter, of those of its parts, in their order; tensors of their own.

    Args:
        states: of the parts.
        layout: of the parameter.
        empty: makes what has a number for each element.
    """
    entries = {key: _own(value) for key, value in states[0].kept.items()}
    for key, first in states[0].cut.items():
        whole = window(empty((layout.shape.numel(),), first.dtype), 0, layout)
        flat = flat_view(whole, layout)
        for state in states:
            flat[state.member.first : state.member.first + state.member.numel] = state.cut[key]
        entries[key] = whole
    return entries


def _own(value: Any) -> Any:
    """Return an entry that is changed in place without a change of this one."""
    return value.clone() if isinstance(value, Tensor) else value
