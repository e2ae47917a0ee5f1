"""`DeviceCollectives`: collectives on device tensors where they lie, by something that can send from there.

From any tensor to contiguous memory of its own device, and back: what is left to NCCL or MPI are a handful of
operations on flat tensors.
"""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, as_one, cut_by, in_order, overlap
from mpisgd.core.consistency import Operation
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["DeviceCollectives"]


class DeviceCollectives(abc.ABC):
    """The collectives of one group on device tensors.

    Arguments are those of the public functions, checked, roots are ranks of the group; `operation` says
    what the ranks must agree on.
    """

    def __init__(self, group: "Group") -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size

    @abc.abstractmethod
    def takes(self, op: ReduceOp | None, dtype: torch.dtype) -> bool:
        """Return whether it can reduce so, or move that (`op` None); the same on all ranks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what it holds. Collective."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """End what the others have never joined; it cannot be used afterwards."""

    @abc.abstractmethod
    def run(
        self,
        operation: Operation,
        launch: Callable[[], Any],
        finish: Callable[[], None],
        *,
        tensors: Sequence[Tensor],
        device: torch.device,
        async_op: bool,
    ) -> Work | None:
        """Have `launch` begin the operation on `device`, and `finish` bring its result into `tensors`."""

    # On contiguous [n] tensors of the device. Each returns what `run` waits for.

    @abc.abstractmethod
    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> Any: ...

    @abc.abstractmethod
    def _reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Any: ...

    @abc.abstractmethod
    def _broadcast(self, flat: Tensor, root: int) -> Any: ...

    @abc.abstractmethod
    def _all_gather(self, out: Tensor, flat: Tensor) -> Any: ...

    @abc.abstractmethod
    def _reduce_scatter(self, out: Tensor, flat: Tensor, op: ReduceOp) -> Any: ...

    @abc.abstractmethod
    def _all_to_all(self, out: Tensor, flat: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Any: ...

    # -- the collectives ----------------------------------------------------------------------------

    def all_reduce(
        self,
        operation: Operation,
        tensor: Tensor,
        op: ReduceOp,
        async_op: bool,
        then: Callable[[], None] | None = None,
    ) -> Work | None:
        """See `mpisgd.all_reduce`; `then` is done with the result."""
        landing = StagedOutput(tensor, keep=True, at_home=True)

        def finish() -> None:
            landing.settle()
            if then is not None:
                then()

        return self.run(
            operation,
            lambda: self._all_reduce(landing.flat, op),
            finish,
            tensors=[tensor],
            device=tensor.device,
            async_op=async_op,
        )

    def all_reduce_coalesced(
        self, operation: Operation, lists: Sequence[Sequence[Tensor]], op: ReduceOp, async_op: bool
    ) -> Work | None:
        """See `mpisgd.all_reduce_coalesced`; each of `lists` travels as one."""
        packs = [_Pack(same) for same in lists]
        return self.run(
            operation,
            lambda: [self._all_reduce(pack.flat, op) for pack in packs],
            lambda: _unpack(packs),
            tensors=[tensor for same in lists for tensor in same],
            device=lists[0][0].device,
            async_op=async_op,
        )

    def broadcast(self, operation: Operation, tensor: Tensor, root: int, async_op: bool) -> Work | None:
        """See `mpisgd.broadcast`."""
        landing = StagedOutput(tensor, keep=self.rank == root, at_home=True)
        return self.run(
            operation,
            lambda: self._broadcast(landing.flat, root),
            lambda: None if self.rank == root else landing.settle(),
            tensors=[tensor],
            device=tensor.device,
            async_op=async_op,
        )

    def broadcast_coalesced(
        self, operation: Operation, lists: Sequence[Sequence[Tensor]], root: int, async_op: bool
    ) -> Work | None:
        """See `mpisgd.broadcast_coalesced`; each of `lists` travels as one."""
        packs = [_Pack(same) for same in lists]
        return self.run(
            operation,
            lambda: [self._broadcast(pack.flat, root) for pack in packs],
            lambda: None if self.rank == root else _unpack(packs),
            tensors=[tensor for same in lists for tensor in same],
            device=lists[0][0].device,
            async_op=async_op,
        )

    def reduce(
        self, operation: Operation, tensor: Tensor, root: int, op: ReduceOp, async_op: bool
    ) -> Work | None:
        """See `mpisgd.reduce`."""
        landing = StagedOutput(tensor, keep=True, at_home=True)
        return self.run(
            operation,
            lambda: self._reduce(landing.flat, root, op),
            lambda: landing.settle() if self.rank == root else None,
            tensors=[tensor],
            device=tensor.device,
            async_op=async_op,
        )

    def all_gather(
        self, operation: Operation, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool
    ) -> Work | None:
        """See `mpisgd.all_gather`."""
        flat = in_order(tensor)
        gathered = flat.new_empty(self.size * flat.numel())
        return self.run(
            operation,
            lambda: self._all_gather(gathered, flat),
            lambda: _deal_out(gathered, outputs),
            tensors=outputs,
            device=tensor.device,
            async_op=async_op,
        )

    def all_gather_into(
        self, operation: Operation, pairs: Sequence[tuple[Tensor, Tensor]], async_op: bool
    ) -> Work | None:
        """See `mpisgd.all_gather_into_tensor`, for each pair of an output and an input."""
        landings = [StagedOutput(output, keep=False, at_home=True) for output, _ in pairs]
        places = [landing.flat for landing in landings]
        inputs = [self._own_part(out, tensor) for out, (_, tensor) in zip(places, pairs, strict=True)]
        return self.run(
            operation,
            lambda: [self._all_gather(out, flat) for out, flat in zip(places, inputs, strict=True)],
            lambda: _settle(landings),
            tensors=[output for output, _ in pairs],
            device=pairs[0][0].device,
            async_op=async_op,
        )

    def _own_part(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Return what this rank gives, which may lie in its own place of `out` already."""
        flat = in_order(tensor)
        own = out.data_ptr() + self.rank * flat.nbytes
        return flat.clone() if overlap(flat, out) and flat.data_ptr() != own else flat

    def reduce_scatter(
        self, operation: Operation, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, async_op: bool
    ) -> Work | None:
        """See `mpisgd.reduce_scatter`."""
        whole = torch.cat([in_order(tensor) for tensor in inputs])
        return self.reduce_scatter_from(operation, [(output, whole)], op, async_op)

    def reduce_scatter_from(
        self, operation: Operation, pairs: Sequence[tuple[Tensor, Tensor]], op: ReduceOp, async_op: bool
    ) -> Work | None:
        """See `mpisgd.reduce_scatter_tensor`, for each pair of an output and an input."""
        landings = [StagedOutput(output, keep=False, at_home=True) for output, _ in pairs]
        inputs = [
            _apart(in_order(tensor), place.flat) for place, (_, tensor) in zip(landings, pairs, strict=True)
        ]
        return self.run(
            operation,
            lambda: [
                self._reduce_scatter(a.flat, flat, op) for a, flat in zip(landings, inputs, strict=True)
            ],
            lambda: _settle(landings),
            tensors=[output for output, _ in pairs],
            device=pairs[0][0].device,
            async_op=async_op,
        )

    def gather(
        self, operation: Operation, outputs: Sequence[Tensor], tensor: Tensor, root: int, async_op: bool
    ) -> Work | None:
        """See `mpisgd.gather`: everyone gives to the root alone."""
        numel = tensor.numel()
        takes = [numel if self.rank == root else 0] * self.size
        gives = [numel if rank == root else 0 for rank in range(self.size)]
        return self._exchange(operation, outputs, [in_order(tensor)], takes, gives, async_op)

    def scatter(
        self, operation: Operation, tensor: Tensor, inputs: Sequence[Tensor], root: int, async_op: bool
    ) -> Work | None:
        """See `mpisgd.scatter`: everyone takes from the root alone."""
        numel = tensor.numel()
        takes = [numel if rank == root else 0 for rank in range(self.size)]
        gives = [numel if self.rank == root else 0] * self.size
        pieces = [in_order(piece) for piece in inputs] or [in_order(tensor).new_empty(0)]
        return self._exchange(operation, [tensor], pieces, takes, gives, async_op)

    def all_to_all(
        self, operation: Operation, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool
    ) -> Work | None:
        """See `mpisgd.all_to_all`."""
        takes, gives = [output.numel() for output in outputs], [tensor.numel() for tensor in inputs]
        pieces = [in_order(tensor) for tensor in inputs]
        return self._exchange(operation, outputs, pieces, takes, gives, async_op)

    def _exchange(
        self,
        operation: Operation,
        outputs: Sequence[Tensor],
        pieces: Sequence[Tensor],
        takes: Sequence[int],
        gives: Sequence[int],
        async_op: bool,
    ) -> Work | None:
        source = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
        out = source.new_empty(sum(takes))
        return self.run(
            operation,
            lambda: self._all_to_all(out, source, takes, gives),
            lambda: _deal_out(out, outputs),
            tensors=outputs,
            device=source.device,
            async_op=async_op,
        )

    def all_to_all_single(
        self,
        operation: Operation,
        output: Tensor,
        tensor: Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        async_op: bool,
    ) -> Work | None:
        """See `mpisgd.all_to_all_single`; the sizes are in elements."""
        landing = StagedOutput(output, keep=False, at_home=True)
        source = _apart(in_order(tensor), landing.flat)
        return self.run(
            operation,
            lambda: self._all_to_all(landing.flat, source, takes, gives),
            landing.settle,
            tensors=[output],
            device=output.device,
            async_op=async_op,
        )


class _Pack:
    """Tensors of one dtype as one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.landings = [StagedOutput(tensor, keep=True, at_home=True) for tensor in tensors]
        self.flat = as_one([landing.flat for landing in self.landings])

    def settle(self) -> None:
        pieces = cut_by(self.flat, [landing.flat.numel() for landing in self.landings])
        for landing, piece in zip(self.landings, pieces, strict=True):
            landing.settle(piece)


def _unpack(packs: Sequence[_Pack]) -> None:
    for pack in packs:
        pack.settle()


def _settle(landings: Sequence[StagedOutput]) -> None:
    for landing in landings:
        landing.settle()


def _deal_out(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy consecutive pieces of `flat` into tensors, as many as there are."""
    for output, piece in zip(outputs, cut_by(flat, [o.numel() for o in outputs]), strict=True):
        output.detach().copy_(piece.view(output.shape))


def _apart(source: Tensor, out: Tensor) -> Tensor:
    return source.clone() if overlap(source, out) else source
