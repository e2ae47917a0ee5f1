"""What a training step costs in a layout, found without doing it: bytes sent, bytes held, operations.

A copy of the model without numbers (torch's FakeTensorMode) is laid out and run forward and backward.
DTensor then does what it would do, and each collective and each product on a rank's parts is noted as it is
dispatched: that is the stream of operations of a step, see `mpisgd.methods.cost_kit`.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group,
    get_process_group_ranks,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpisgd.layouts.dimension_names import DimensionNames
from mpisgd.layouts.distribution import distribute
from mpisgd.layouts.rules import LayoutRules
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.cost_kit import (
    TENSOR,
    Alloc,
    Check,
    Collective,
    Compute,
    Cycle,
    Free,
    Op,
    Sizes,
    Wait,
    World,
)
from mpisgd.methods.costs import MethodCost, wire_of
from mpisgd.methods.peak_memory import peak_of
from mpisgd.methods.wire_bytes import sent_bytes

__all__ = ["LayoutCost", "count_cost"]

Loss = Callable[[Any], Tensor]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class LayoutCost:
    """What a training step costs each rank.

    Attributes:
        sent_bytes: what a rank sends, by ring algorithms: 2 (n - 1) / n of what n ranks all-reduce, (n - 1)
            / n of what they gather or scatter.
        num_collectives: how many calls that takes.
        parameter_bytes: of the rank's parts of the parameters, and of the buffers of modules.
        activation_bytes: what autograd keeps for backward.
        operations: multiplications and additions of matrices.
        ops: what is sent and computed, in this order.
        trained: the parts of parameters that have gradients, without values.
    """

    sent_bytes: int
    num_collectives: int
    parameter_bytes: int
    activation_bytes: int
    operations: int
    ops: tuple[Op, ...] = field(default=(), repr=False, compare=False)
    trained: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)

    @property
    def gradient_bytes(self) -> int:
        """Of the rank's parts of the gradients."""
        return sum(each.nbytes for each in self.trained)

    def held_bytes(self, state_copies: int = 2) -> int:
        """Return parameters, gradients, the optimizer's state (2 copies: Adam) and activations together."""
        state = state_copies * self.gradient_bytes
        return int(peak_of([*self._before(state), *self._step()]).total)

    def method(self, state_bytes: float) -> MethodCost:
        """Return it as the cost of a method, whose sizes and ranks are those that were counted.

        Args:
            state_bytes: what the optimizer keeps of the rank's parts.
        """

        def steps(sizes: Sizes, world: World, step: int) -> Iterator[Op]:
            yield from self._step() if step else self._before(state_bytes)

        return MethodCost(steps, lambda _: Cycle(), also_alone=True)

    def _before(self, state_bytes: float) -> Iterator[Op]:
        yield Alloc("parameters", self.parameter_bytes)
        yield Alloc("gradients", self.gradient_bytes)
        yield Alloc("optimizer", state_bytes)

    def _step(self) -> Iterator[Op]:
        yield Alloc("activations", self.activation_bytes)
        yield from self.ops
        yield Wait()
        yield Free("activations", self.activation_bytes)


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
        kept, step = _Kept(twin), _Step()
        with step:
            with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                output = twin(*inputs)
                total = output.sum() if loss is None else loss(output)
            total.backward()
        parts = [local_part(param) for param in twin.parameters() if param.requires_grad]
    held = sum(local_part(each).nbytes for each in (*twin.parameters(), *twin.buffers()))
    sent = sent_bytes(step.ops, World(1, mesh.size(), wire_of(Compression.none)))
    return LayoutCost(
        sent_bytes=round(sum(sent.values())),
        num_collectives=sum(isinstance(op, Collective) for op in step.ops),
        parameter_bytes=held,
        activation_bytes=kept.nbytes,
        operations=sum(op.operations for op in step.ops if isinstance(op, Compute)),
        ops=tuple(step.ops),
        trained=tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in parts),
    )


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
    """Return this rank's local part of a tensor."""
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


class _Step(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is dispatched: the collectives of this rank, and its share of products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._inside = False  # an operation on DTensors

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
            self.ops += [Wait()] if func._opname == "wait_tensor" else _collective(func._opname, args, out)
        elif func._overloadpacket in flop_registry and not self._inside:
            operations = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.ops.append(Compute("products", operations=operations // _num_parts(out)))
        return out


def _num_parts(out: Any) -> int:
    """Return how many ranks share a product: those of axes along which its result is a part or a summand."""
    first = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(first, DTensor):
        return 1
    mesh = first.device_mesh
    return prod(mesh.size(axis) for axis, where in enumerate(first.placements) if not where.is_replicate())


def _collective(name: str, args: Sequence[Any], out: Any) -> list[Op]:
    """Return a collective, of the bytes that `Collective` counts, and the check before it."""
    kind = next((each for each in COLLECTIVES if name.startswith(each)), None)
    if kind is None:
        raise NotImplementedError(name)
    nbytes = out.nbytes if kind == "all_gather" else args[0].nbytes
    ranks = tuple(get_process_group_ranks(_resolve_process_group(args[-1])))
    whole = Collective(kind, nbytes, TENSOR, itemsize=out.itemsize, num_ranks=len(ranks), ranks=ranks)
    return [Check(TENSOR, ranks), whole]
