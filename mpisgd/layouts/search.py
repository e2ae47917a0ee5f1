"""All legal layouts of a model, and the cheapest of them that fits into a rank's memory."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor, nn

from mpisgd.arguments import check_count, check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.layouts.cost import LayoutCost, Loss
from mpisgd.layouts.dimension_names import DimensionNames, resolve_names
from mpisgd.layouts.layout import MeshLayout
from mpisgd.layouts.rules import Dims, parse_mesh

__all__ = ["auto_layout", "legal_layouts"]

Mesh = tuple[tuple[str, int], ...]


def auto_layout(
    model: nn.Module,
    names: Mapping[str, Dims],
    mesh: str | Mapping[str, int],
    example: Sequence[Any],
    *,
    inputs: Sequence[Dims] | Dims = (),
    outputs: Dims | None = None,
    loss: Loss | None = None,
    memory_bytes: int | None = None,
    state_copies: int = 2,
    operations_per_byte: float = 100.0,
) -> MeshLayout:
    """Return the layout in which a training step costs the least among those that fit into memory.

    Tries every legal layout: runs a copy of the model on fake tensors, and counts what DTensor sends, what
    autograd keeps and what each rank computes (`MeshLayout.cost`). The cost is the time of a step in units of
    one byte sent: `sent_bytes + operations / operations_per_byte`. The search takes a fraction of a second
    for each layout, and their number grows with the number of names. Needs no job.

    Args:
        model, names, example, inputs, outputs, loss: as for `MeshLayout.cost`.
        mesh: the axes and their lengths, as for `mpisgd.layout`.
        memory_bytes: memory of a rank for parameters, gradients, the optimizer's state and activations; None:
            no limit.
        state_copies: the optimizer's state in copies of the parameters: 2 for Adam, 1 for momentum, 0 for
            SGD.
        operations_per_byte: number of operations that a rank computes in the time in which its link sends a
            byte: 100 for 100 GFLOP/s and 1 GB/s.

    Raises:
        InvalidArgument: no layout is legal or none fits; the message says which needs the least memory.
    """
    check_count("auto_layout", "state_copies", state_copies)
    check_positive("auto_layout", "operations_per_byte", operations_per_byte)
    if memory_bytes is not None:
        check_positive("auto_layout", "memory_bytes", memory_bytes, whole=True)
    costs: dict[MeshLayout, LayoutCost] = {}
    for layout in legal_layouts(model, names, mesh, example, inputs=inputs, outputs=outputs):
        costs[layout] = layout.cost(model, names, example, inputs=inputs, outputs=outputs, loss=loss)
    held = {layout: cost.held_bytes(state_copies) for layout, cost in costs.items()}
    fitting = [layout for layout in costs if memory_bytes is None or held[layout] <= memory_bytes]
    if not fitting:
        least = min(held, key=held.__getitem__)
        raise InvalidArgument(
            f"auto_layout: none of {len(costs)} layouts fits into memory_bytes={memory_bytes}; the smallest, "
            f"{least}, needs {held[least]}"
        )

    def price(layout: MeshLayout) -> tuple[float, int, int]:
        cost = costs[layout]
        time = cost.sent_bytes + cost.operations / operations_per_byte
        return time, held[layout], len(layout.rules)

    return min(fitting, key=price)


def legal_layouts(
    model: nn.Module,
    names: Mapping[str, Dims],
    mesh: str | Mapping[str, int],
    example: Sequence[Any] = (),
    *,
    inputs: Sequence[Dims] | Dims = (),
    outputs: Dims | None = None,
) -> Iterator[MeshLayout]:
    """Return all layouts that break no rule; of those that differ in the names of equally long axes, one.

    Args:
        model, names, example, inputs, outputs: as for `MeshLayout.cost`; without an example, sizes that no
            parameter has are not known, and every length divides them.
        mesh: the axes and their lengths, as for `mpisgd.layout`.
    """
    axes, found = parse_mesh(mesh), resolve_names(model, names, inputs, outputs)
    seen: set[tuple[tuple[str, str], ...]] = set()
    for choice in product([None, *dict(axes)], repeat=len(found.names)):
        rules = tuple((dim, axis) for dim, axis in zip(found.names, choice, strict=True) if axis is not None)
        layout = MeshLayout(_with_first_axes(rules, axes), axes)
        if layout.rules not in seen and _is_legal(layout, found, example):
            yield layout
        seen.add(layout.rules)


def _with_first_axes(rules: tuple[tuple[str, str], ...], mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """Return rules that take equally long axes in the order of the mesh."""
    lengths, renamed = dict(mesh), dict[str, str]()
    for _, axis in rules:
        if axis not in renamed:
            alike = [other for other, length in mesh if length == lengths[axis]]
            renamed[axis] = next(other for other in alike if other not in renamed.values())
    return tuple((dim, renamed[axis]) for dim, axis in rules)


def _is_legal(layout: MeshLayout, names: DimensionNames, example: Sequence[Any]) -> bool:
    try:
        names.check(layout)
        for place, (arg, dims) in enumerate(zip(example, names.inputs, strict=False)):
            if isinstance(arg, Tensor):
                names.check_call(layout, f"input {place}", dims, arg.shape)
    except InvalidArgument:
        return False
    return True
