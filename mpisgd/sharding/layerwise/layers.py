"""Which modules of a model are brought into memory as a whole, and how they get memory and first values."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpisgd.errors import InvalidArgument

__all__ = ["Initialize", "layers_of", "materialize"]

Initialize = Callable[[nn.Module], object]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
RESETS = ("reset_parameters", "_reset_parameters")  # as torch's own modules call it


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are used one after the other: the children, and what is in containers.

    The model itself is the first, if it has parameters of its own.
    """
    own = [model] if any(True for _ in model.parameters(recurse=False)) else []
    return own + [layer for child in model.children() for layer in _expanded(child)]


def _expanded(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, CONTAINERS):
        return [layer for child in module.children() for layer in _expanded(child)]
    return [module] if any(True for _ in module.parameters()) else []


def materialize(
    layer: nn.Module, initialize: Initialize | None, made: dict[int, Tensor], *, recurse: bool = True
) -> None:
    """Give what a layer has on the device "meta" memory and first values.

    Args:
        layer: the layer.
        initialize: gives it its values; by default `reset_parameters()` of its modules does.
        made: what was made of other layers' tensors, by the id of those; added to.
        recurse: whether the modules in it belong to it.

    Raises:
        InvalidArgument: a module cannot initialize itself.
    """
    modules = list(layer.modules()) if recurse else [layer]
    changed = [module for module in modules if _materialize_own(module, made)]
    if not changed:
        return
    if initialize is not None:
        initialize(layer)
        return
    for module in changed:
        _reset(module)


def _materialize_own(module: nn.Module, made: dict[int, Tensor]) -> bool:
    """Give the tensors of one module memory; return whether some had none."""
    changed = False
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.is_meta:
                held[name] = made.setdefault(id(tensor), _with_memory(tensor))  # type: ignore[assignment]
                made[-id(tensor)] = tensor  # as long as it lives, no other one has its id
                changed = True
    return changed


def _with_memory(tensor: Tensor) -> Tensor:
    memory = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _reset(module: nn.Module) -> None:
    for name in RESETS:
        if callable(reset := getattr(module, name, None)):
            reset()
            return
    raise InvalidArgument(
        f"offload_parameters: a {type(module).__name__} is on the device meta and has no reset_parameters(); "
        "pass init=, which gives a layer its first values"
    )
