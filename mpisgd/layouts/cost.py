"""What a training step costs in a layout, counted without doing it: bytes sent, bytes held, operations.

A copy of the model without numbers (torch's FakeTensorMode) is laid out and run forward and backward.
DTensor then does what it would do, and each collective and each operation on a rank's parts is counted as
it is dispatched.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpisgd.layouts.dimension_names import DimensionNames
from mpisgd.layouts.distribution import distribute
from mpisgd.layouts.rules import LayoutRules

__all__ = ["LayoutCost", "count_cost"]

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class LayoutCost:
    """What a training step costs each rank.

    Attributes:
        sent_bytes: what a rank sends, by ring algorithms: 2 (n - 1) / n of what n ranks all-reduce, (n - 1)
            / n of what they gather or scatter.
        num_collectives: how many calls that takes.
        parameter_bytes: of the rank's parts of the parameters.
        activation_bytes: what autograd keeps for backward.
        operations: multiplications and additions of matrices.
    """

    sent_bytes: int
    num_collectives: int
    parameter_bytes: int
    activation_bytes: int
    operations: int

    def held_bytes(self, state_copies: int = 2) -> int:
        """Return parameters, gradients, the optimizer's state (2 copies: Adam) and activations together."""
        return (2 + state_copies) * self.parameter_bytes + self.activation_bytes


def count_cost(
    model: nn.Module,
    rules: LayoutRules,
    names: DimensionNames,
    example: Sequence[Any],
    loss: Loss | None,
    mesh: DeviceMesh,
) -> LayoutCost:
    """Return the cost of a forward and a backward pass of the loss; sends nothing.

    Args:
        model: unchanged, not distributed; may be on the device "meta".
        rules: legal for `names`.
        names: of this model.
        example: positional arguments of forward; of tensors only shape and dtype count.
        loss: of what forward returns; by default the sum of all elements.
        mesh: of `rules`.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = distribute(_without_numbers(model, mesh.device_type), rules, names, mesh, src=None)
        inputs = [_empty(arg, mesh.device_type) if isinstance(arg, Tensor) else arg for arg in example]
        kept, counter = _Kept(twin), _Counter()
        with counter:
            with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                output = twin(*inputs)
                total = output.sum() if loss is None else loss(output)
            total.backward()
    parts = sum(local_part(param).nbytes for param in twin.parameters())
    return LayoutCost(counter.sent_bytes, counter.num_collectives, parts, kept.nbytes, counter.operations)


def _without_numbers(model: nn.Module, device_type: str) -> nn.Module:
    """Return a copy whose parameters and buffers take no memory; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        twin = _empty(tensor, device_type)
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if is_param else twin
    return copy.deepcopy(model, memo)


def _empty(tensor: Tensor, device_type: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device_type)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Kept:
    """The memory that autograd keeps for backward, beside the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {_storage(param) for param in model.parameters()}
        self._alive: list[Tensor] = []  # so that no address is used again
        self.nbytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Count what is kept for the first time."""
        if _storage(tensor) not in self._known:
            self._known.add(_storage(tensor))
            self._alive.append(tensor)
            self.nbytes += local_part(tensor).untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    address: int = local_part(tensor).untyped_storage()._cdata
    return address


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched: the collectives of this rank, and its share of products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.num_collectives = 0
        self._sent = 0.0
        self._inside = False  # an operation on DTensors

    @property
    def sent_bytes(self) -> int:
        return round(self._sent)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_divided = kwargs or {}, any(issubclass(kind, DTensor) for kind in types)
        if is_divided and self._inside:
            return NotImplemented  # DTensor's turn
        if is_divided:
            self._inside = True
            with self:  # sees the collectives, and what DTensor computes to find out about shapes
                out = func(*args, **kwargs)
            self._inside = False
        else:
            out = func(*args, **kwargs)
        if func.namespace in ("_c10d_functional", "_c10d_functional_autograd"):
            self._sent += _sent_bytes(func._opname, args, out)
            self.num_collectives += func._opname != "wait_tensor"
        elif func._overloadpacket in flop_registry and not self._inside:
            operations = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.operations += operations // _num_parts(out)
        return out


def _num_parts(out: Any) -> int:
    """Return how many ranks share a product: those of axes along which its result is a part or a summand."""
    first = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(first, DTensor):
        return 1
    mesh = first.device_mesh
    return prod(mesh.size(axis) for axis, where in enumerate(first.placements) if not where.is_replicate())


def _sent_bytes(name: str, args: Sequence[Any], out: Any) -> float:
    """Return what a rank sends in a collective, on average over the ranks."""
    if name == "wait_tensor":
        return 0.0
    size = _resolve_process_group(args[-1]).size()
    if name.startswith("all_reduce"):
        nbytes = 2 * args[0].nbytes
    elif name.startswith("all_gather"):
        nbytes = out.nbytes
    elif name.startswith(("reduce_scatter", "all_to_all")):
        nbytes = args[0].nbytes
    else:
        raise NotImplementedError(name)
    return float((size - 1) / size * nbytes)
