"""`NamedModel`: a model with the names of its dimensions, to ask what layouts of it cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.layouts.cost import LayoutCost, Loss
from mpisgd.layouts.dimension_names import resolve_names
from mpisgd.layouts.layout import MeshLayout
from mpisgd.layouts.rules import Dims

__all__ = ["NamedModel"]


@dataclass(frozen=True, eq=False)
class NamedModel:
    """A model, the names of its dimensions and an example, which `estimate_memory`, `memory` and `plan` take.

    Needs no job. The model and the example may be on the device "meta", where they take no memory.

    Attributes:
        model: plain, as for `MeshLayout.distribute`.
        names: of its parameters and modules, as there.
        example: positional arguments of forward; the first dimension of the first one is that of examples.
        inputs: the names of these arguments.
        outputs: the names of what the model returns.
        loss: a function of what forward returns; by default the sum of its elements.

    Raises:
        InvalidArgument: the names do not fit the model, or `example` is not a list of arguments whose first
            one is a tensor of one or more examples.
    """

    model: nn.Module
    names: Mapping[str, Dims]
    example: Sequence[Any]
    inputs: Sequence[Dims] | Dims = ()
    outputs: Dims | None = None
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidArgument(f"NamedModel: model={shown(self.model)}; expected a torch.nn.Module")
        if not isinstance(self.example, (list, tuple)) or not any(map(_has_rows, self.example[:1])):
            raise InvalidArgument(
                f"NamedModel: example={shown(self.example)}; expected the arguments of forward in a list, "
                "the first one a tensor of one or more examples"
            )
        if not isinstance(self.names, Mapping):
            raise InvalidArgument(f"NamedModel: names={shown(self.names)}; expected a mapping")
        resolve_names(self.model, self.names, self.inputs, self.outputs)

    def of_examples(self, number: int) -> "NamedModel":
        """Return this model with an example of `number` rows, in every argument with as many as the first."""
        rows = len(self.example[0])

        def resized(arg: Any) -> Any:
            if not _has_rows(arg) or len(arg) != rows:
                return arg
            return arg.new_empty((number, *arg.shape[1:]), device="meta")

        return replace(self, example=[resized(arg) for arg in self.example])

    def cost(self, layout: MeshLayout) -> LayoutCost:
        """Return the cost of a training step in a layout for each rank; see `MeshLayout.cost`.

        Raises:
            InvalidArgument: the layout breaks a rule, or its step cannot be counted.
        """
        options: dict[str, Any] = {"inputs": self.inputs, "outputs": self.outputs, "loss": self.loss}
        try:
            return layout.cost(self.model, self.names, self.example, **options)
        except MpisgdError:
            raise
        except Exception as exc:  # of the user's model, of its loss, or DTensor's
            said = str(exc).partition("\n")[0]
            raise InvalidArgument(
                f"layout {layout}: a step cannot be counted: {type(exc).__name__}: {said}"
            ) from exc


def _has_rows(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.ndim > 0 and len(arg) > 0
