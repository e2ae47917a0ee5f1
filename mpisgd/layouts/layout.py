"""`layout`: a model's tensors divided over a mesh of ranks, by the names of their dimensions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from mpisgd.arguments import shown
from mpisgd.core.consistency import Operation
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import world
from mpisgd.layouts.cost import LayoutCost, Loss, count_cost
from mpisgd.layouts.dimension_names import DimensionNames, resolve_names
from mpisgd.layouts.distribution import distribute
from mpisgd.layouts.placement import device_mesh, placements, shard
from mpisgd.layouts.pretended import pretended_ranks
from mpisgd.layouts.rules import Dims, LayoutRules, parse_mesh, parse_rules
from mpisgd.methods.from_text import call_of

__all__ = ["MeshLayout", "layout", "layout_from_text"]


@dataclass(frozen=True)
class MeshLayout(LayoutRules):
    """Which dimensions of a model's tensors are divided along which axes of a mesh of ranks.

    Made by `mpisgd.layout` from a text. It is plain data: it can be printed, compared, and made without a
    job.

    Attributes:
        rules: (dimension, axis) for each divided dimension, by name.
        mesh: (axis, length); neighbouring ranks are along the last axis.
    """

    def distribute(
        self,
        model: nn.Module,
        names: Mapping[str, Dims],
        *,
        inputs: Sequence[Dims] | Dims = (),
        outputs: Dims | None = None,
    ) -> nn.Module:
        """Divide the parameters of `model` by their dimensions' names; return it.

        Collective: all ranks call it with the same model and names. The parameters become DTensors with the
        values of rank 0; make the optimizer afterwards, any of torch's. Forward takes whole tensors, equal
        on all ranks, and returns DTensors; `loss.full_tensor()` is a plain one. Gradients are summed over
        the mesh in backward and have the layout of their parameters, so the result is that of one process.

        Args:
            model: of plain tensors, whole on each rank; changed in place.
            names: dimension names by parameter or buffer, `{"up.weight": ("hidden", "model")}`, and by
                module, of the one tensor that it returns, `{"blocks.*": ("batch", "length", "model")}`; `*`
                stands for one part of a dotted name, None for a dimension without a name. What is not
                listed is copied to all ranks, and DTensor chooses the layout of the outputs of modules that
                are not listed.
            inputs: dimension names of each positional argument of forward, or of its only one.
            outputs: dimension names of the tensor that the model returns.

        Raises:
            InvalidArgument: the layout breaks a rule, which the message quotes, the mesh has another number
                of places than the job has ranks, or names do not fit the model; found on every rank before
                anything is sent. In forward: an input has a size that cannot be divided.
            CollectiveMismatch: the ranks' layouts, names or shapes differ; raised on every rank.
        """
        self.check_ranks(world().size)
        found = self._resolve(model, names, inputs, outputs)
        self._agree(found)
        mesh = device_mesh(self, _device_type(model))
        return distribute(model, self, found, mesh)

    def placements(self, dims: Dims) -> tuple[Placement, ...]:
        """Return DTensor's placements of a tensor with these dimensions, one for each axis of the mesh.

        Raises:
            InvalidArgument: two of the dimensions are on one axis.
        """
        return placements(self, dims)

    def shard(self, tensor: Tensor, dims: Dims) -> DTensor:
        """Return the DTensor of a tensor that all ranks have whole, such as the targets of a loss.

        Collective if it is the first use of this mesh; otherwise nothing is sent.

        Raises:
            InvalidArgument: the tensor cannot be divided in this way.
        """
        self.check("the tensor", dims, tensor.shape)
        return shard(self, tensor, dims, device_mesh(self, tensor.device.type))

    def cost(
        self,
        model: nn.Module,
        names: Mapping[str, Dims],
        example: Sequence[Any],
        *,
        inputs: Sequence[Dims] | Dims = (),
        outputs: Dims | None = None,
        loss: Loss | None = None,
    ) -> LayoutCost:
        """Return the cost of a training step of `model` for each rank; computes and sends nothing.

        Needs no job, and asks about any number of ranks. Meanwhile no other thread may use torch.distributed.

        Args:
            model: plain, unchanged; on the device "meta" it takes no memory.
            names, inputs, outputs: as in `distribute`.
            example: positional arguments of forward, of the sizes of a step.
            loss: a function of what forward returns; by default the sum of its elements.

        Raises:
            InvalidArgument: as `distribute`.
        """
        found = self._resolve(model, names, inputs, outputs)
        with pretended_ranks(self.num_ranks):
            return count_cost(model, self, found, example, loss, device_mesh(self, _device_type(model)))

    def _resolve(
        self, model: nn.Module, names: Mapping[str, Dims], inputs: Sequence[Dims] | Dims, outputs: Dims | None
    ) -> DimensionNames:
        found = resolve_names(model, names, inputs, outputs)
        found.check(self)
        return found

    def _agree(self, names: DimensionNames) -> None:
        """Make sure that all ranks lay out the same model in the same way."""
        text = "\n".join([*(f"{what}: {dims}" for what, dims in names), *map(str, names.shapes.items())])
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        operation = Operation("layout", extra=f"{self}, names and shapes with hash {digest}")
        world().queue.run(operation, lambda: None, detail=lambda: text)


def layout(rules: str | Mapping[str, str], mesh: str | Mapping[str, int]) -> MeshLayout:
    """Return the layout that divides dimensions by name: `layout("batch:dp; hidden:tp", mesh="dp:2, tp:2")`.

    Each rule maps a dimension name to an axis of the mesh. Every tensor is divided along the axes of its
    dimensions and copied along the others; the results are the same for every layout. See
    `MeshLayout.distribute`.

    Args:
        rules: `dimension:axis` items separated by semicolons or commas, or a mapping. Without rules all
            tensors are copied.
        mesh: `axis:length` items, or a mapping. Neighbouring ranks, usually of one host, are along the last
            axis.

    Raises:
        InvalidArgument: a rule is broken, which the message quotes: a dimension on two axes, an unknown axis.

    Source: Shazeer et al. 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers".
    """
    return MeshLayout(parse_rules(rules), parse_mesh(mesh))


def layout_from_text(text: str) -> MeshLayout:
    """Return the layout of a text such as `layout("batch:dp; hidden:tp", mesh="dp:2, tp:2")`.

    Raises:
        InvalidArgument: it is no such call, or as for `layout`.
    """
    name, arguments, options = call_of("layout", text)
    if name != "layout":
        raise InvalidArgument(f"layout {shown(text)}: expected such as layout('batch:dp', mesh='dp:2')")
    try:
        return layout(*arguments, **options)
    except TypeError as exc:
        raise InvalidArgument(f"layout {shown(text)}: {exc}") from exc


def _device_type(model: nn.Module) -> str:
    """Return where the mesh computes; a model on "meta" is only counted, as on the CPU."""
    types = {param.device.type for param in model.parameters()} - {"meta"}
    return types.pop() if len(types) == 1 else "cpu"
