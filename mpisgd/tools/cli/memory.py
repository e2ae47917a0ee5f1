"""`python -m mpisgd memory`: what each rank will keep in memory for a training, by strategy.

python -m mpisgd memory --model train:make_model --optimizer AdamW --ranks 8
python -m mpisgd memory --parameters 7.5e9 --dtype bfloat16 --master float32 --optimizer Adam --ranks 64
python -m mpisgd memory --model train:make_model --ranks 8 --strategy 'Sharded(offload=Offload("/tmp"))'
python -m mpisgd memory --model train:named_model --ranks 4 --strategy "layout('hidden:tp', 'tp:4')"
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

import typer

from mpisgd.errors import InvalidArgument
from mpisgd.tools.cli.program import bad_input

if TYPE_CHECKING:
    import torch

    from mpisgd.layouts.layout import MeshLayout
    from mpisgd.layouts.named_model import NamedModel
    from mpisgd.methods.strategy.strategy import Strategy

__all__ = ["memory"]

LAYER_NUMEL = 2**22
MOST_PARAMETERS = 10**13  # beyond which a table of layers would take the memory of this machine


def memory(
    model: str = typer.Option(
        "",
        help="module:function, where the function takes no arguments and returns the model or a NamedModel.",
    ),
    parameters: float = typer.Option(0.0, min=0.0, help="Number of parameters, instead of --model."),
    dtype: str = typer.Option("", help="dtype of the parameters; default: that of the model, or float32."),
    optimizer: str = typer.Option("AdamW", help="The name of a class of torch.optim."),
    master: str = typer.Option("", help="dtype of updates, such as float32 for a model in bfloat16."),
    ranks: int = typer.Option(1, min=1, help="Number of ranks that train together."),
    ranks_per_host: int | None = typer.Option(
        None, min=1, help="Number of ranks on each host; default: all."
    ),
    strategy: list[str] = typer.Option(
        [], help="A strategy, such as DiLoCo(100), or layout('batch:dp', 'dp:8'); may be repeated."
    ),
) -> None:
    """Print what each rank will keep in memory for a training, by strategy. Starts no job."""
    # Here, since it loads torch: seconds that `--help` need not take.
    from mpisgd.optim.memory_estimate import estimate_memory

    with bad_input():
        if bool(model) == bool(parameters):
            raise InvalidArgument("memory: pass one of --model and --parameters")
        if ranks_per_host is not None and ranks_per_host > ranks:
            raise InvalidArgument(f"memory: --ranks-per-host {ranks_per_host} of --ranks {ranks}")
        made = _model(model, dtype) if model else _parameters(parameters, dtype)
        estimates = estimate_memory(
            made,
            _optimizer(optimizer),
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            master_dtype=_master(master, made) if master else None,
            strategies=list(map(_strategy, strategy)) or None,
        )
    typer.echo(estimates)


def _strategy(text: str) -> "Strategy | MeshLayout":
    """Return a strategy, or a layout."""
    from mpisgd.layouts.layout import layout_from_text
    from mpisgd.methods.from_text import strategy_from_text

    return layout_from_text(text) if text.startswith("layout(") else strategy_from_text(text)


def _model(path: str, dtype: str) -> "torch.nn.Module | NamedModel":
    """Return the model that a function of a module or of a file in this folder makes, without values."""
    import torch

    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise InvalidArgument(f"memory: --model {path}: {exc}; expected such as train:make_model") from exc
    try:
        with torch.device("meta"):
            made = make()
    except Exception as exc:
        raise InvalidArgument(f"memory: --model {path}: {name}() has raised {exc!r}") from exc
    plain = _plain(made)
    if not isinstance(plain, torch.nn.Module):
        raise InvalidArgument(f"memory: --model {path} returns a {type(made).__name__}; expected a module")
    if dtype:
        plain.to(_dtype(dtype))
    found: torch.nn.Module | NamedModel = made
    return found


def _plain(made: Any) -> Any:
    """Return the model without the names of its dimensions."""
    from mpisgd.layouts.named_model import NamedModel

    return made.model if isinstance(made, NamedModel) else made


def _parameters(number: float, dtype: str) -> "list[torch.Tensor]":
    """Return so many parameters, in tensors as those of a large layer are."""
    import torch

    if not 1 <= number <= MOST_PARAMETERS:
        raise InvalidArgument(f"memory: --parameters {number:g}; expected 1 to {MOST_PARAMETERS:.0e}")
    numel = int(number)
    sizes = [min(LAYER_NUMEL, numel - start) for start in range(0, numel, LAYER_NUMEL)]
    kind = _dtype(dtype or "float32")
    return [torch.nn.Parameter(torch.empty(size, dtype=kind, device="meta")) for size in sizes]


def _dtype(name: str) -> "torch.dtype":
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidArgument(f"memory: {name} is no floating dtype of torch")
    return dtype


def _master(name: str, made: "torch.nn.Module | NamedModel | list[torch.Tensor]") -> "torch.dtype":
    """Return the precision of updates, which is to be higher than that of some parameter."""
    dtype = _dtype(name)
    params = made if isinstance(made, list) else list(_plain(made).parameters())
    if not any(param.dtype.itemsize < dtype.itemsize for param in params):
        raise InvalidArgument(
            f"memory: --master {name}; expected a higher precision than the parameters have"
        )
    return dtype


def _optimizer(name: str) -> "type[torch.optim.Optimizer]":
    import torch

    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise InvalidArgument(f"memory: --optimizer {name} is no class of torch.optim")
    return kind
