"""A model by a layout: parameters become DTensors, inputs and outputs are laid out as they pass.

What happens between them is DTensor's: each operation works on this rank's parts, and where a divided
dimension is summed over, the sums are added up over the ranks of its axis when somebody needs them. A
gradient is such a sum over the batch; it gets the layout of its parameter before it is accumulated.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_module, distribute_tensor

from mpisgd.errors import InvalidArgument
from mpisgd.layouts.dimension_names import DimensionNames
from mpisgd.layouts.inside import enter_with_every_module
from mpisgd.layouts.losses import correct_mean_losses
from mpisgd.layouts.placement import placements, shard
from mpisgd.layouts.rules import LayoutRules

__all__ = ["distribute"]


def distribute(
    model: nn.Module, rules: LayoutRules, names: DimensionNames, mesh: DeviceMesh, *, src: int | None = 0
) -> nn.Module:
    """Divide the parameters of `model` in place, and let its forward take and return tensors of the layout.

    Args:
        model: of plain tensors, whole on each rank.
        rules: legal for `names`.
        names: of this model.
        mesh: of `rules`.
        src: the rank along each axis whose values count, or None: all have the same, nothing is sent.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise InvalidArgument("layout: this model is distributed already")
    correct_mean_losses()
    divided: dict[int, Tensor] = {}  # a tied parameter stays one

    def divide(prefix: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in divided:
                    dims = names.tensors.get(f"{prefix}.{key}" if prefix else key, ())
                    divided[id(tensor)] = _divided(tensor, mesh, placements(rules, dims), src)
                tensors[key] = divided[id(tensor)]  # type: ignore[assignment]

    for name, module in model.named_modules():
        if name in names.modules:
            module.register_forward_hook(_lay_out_output(rules, names, name, mesh))
    originals = list(model.parameters())  # so that no id is used again
    distribute_module(model, mesh, divide)
    del originals
    _lay_out_inputs(model, rules, names, mesh)
    enter_with_every_module(model)
    return model


def _divided(tensor: Tensor, mesh: DeviceMesh, where: tuple[Placement, ...], src: int | None) -> Tensor:
    """Return this rank's part of a parameter or buffer."""
    part = distribute_tensor(tensor.detach(), mesh, where, src_data_rank=src)
    if not isinstance(tensor, nn.Parameter):
        return part
    param = nn.Parameter(part, requires_grad=tensor.requires_grad)
    if param.requires_grad:
        param.register_hook(_as_laid_out(where))  # type: ignore[no-untyped-call]
    return param


def _as_laid_out(where: tuple[Placement, ...]) -> Callable[[Tensor], Tensor]:
    """Return a function that gives a gradient its parameter's layout, adding up sums over divided rows."""

    def lay_out(grad: Tensor) -> Tensor:
        return grad.redistribute(placements=where) if isinstance(grad, DTensor) else grad

    return lay_out


def _lay_out_output(
    rules: LayoutRules, names: DimensionNames, name: str, mesh: DeviceMesh
) -> Callable[[nn.Module, Any, Any], DTensor]:
    """Return a forward hook of the module `name`."""
    dims, what = names.modules[name], f"the output of {name or 'the model'}"

    def lay_out(module: nn.Module, args: Any, output: Any) -> DTensor:
        if not isinstance(output, DTensor):
            raise InvalidArgument(
                f"layout: {what} is a {type(output).__name__}; only a tensor can have names"
            )
        names.check_call(rules, what, dims, output.shape)
        return output.redistribute(mesh, placements(rules, dims))

    return lay_out


def _lay_out_inputs(model: nn.Module, rules: LayoutRules, names: DimensionNames, mesh: DeviceMesh) -> None:
    """Let forward take tensors that all ranks have whole."""

    def lay_out(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(args) > len(names.inputs):
            raise InvalidArgument(
                f"layout: forward got {len(args)} positional arguments, inputs names {len(names.inputs)}"
            )
        laid_out = []
        for place, (arg, dims) in enumerate(zip(args, names.inputs, strict=False)):
            if isinstance(arg, Tensor) and not isinstance(arg, DTensor):
                names.check_call(rules, f"input {place}", dims, arg.shape)
                arg = shard(rules, arg, dims, mesh)
            laid_out.append(arg)
        return tuple(laid_out)

    model.register_forward_pre_hook(lay_out)
