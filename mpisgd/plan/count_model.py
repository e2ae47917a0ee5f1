"""A `Model` of a torch module, counted on the meta device: nothing is computed there, nor takes memory."""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpisgd.arguments import shown
from mpisgd.bench.cases import BATCHES
from mpisgd.bench.training import StepTask, build, examples
from mpisgd.errors import InvalidArgument
from mpisgd.plan.model import Layer, Model
from mpisgd.plan.saved_bytes import SavedBytes

__all__ = ["bench_model", "count", "model_from_function"]


def count(name: str, model: nn.Module, *inputs: Tensor) -> Model:
    """Return the layers of a module that have parameters of their own, in the order in which they are called.

    A layer that is called several times counts once, with the operations of all its calls. Operations are
    those that torch's FlopCounterMode knows: products of matrices, convolutions, attention.

    Args:
        name: for tables.
        model: any module; a copy of it without memory is called.
        inputs: what it is called with, a batch of examples in the first dimension.
    """
    examples = max(1, len(inputs[0]))
    bare = _on_meta(model)
    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(_note(path, order))
        for path, module in bare.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    counter = FlopCounterMode(display=False)
    with counter, SavedBytes(lambda: order[-1] if order else "") as saved:
        bare(*(each.to("meta") for each in inputs))
    for hook in hooks:
        hook.remove()
    layers = _layers(bare, order, counter.get_flop_counts(), saved.by_place, examples)
    itemsize = next(bare.parameters()).element_size()
    return Model(name, tuple(layers), itemsize)


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy without memory: shapes, and which parameters are the same."""
    params = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    buffers = {id(b): b.to("meta") for b in model.buffers()}
    return copy.deepcopy(model, {**params, **buffers})


def _note(path: str, order: list[str]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        order.append(path)

    return hook


def _layers(
    model: nn.Module, order: list[str], flops: Any, kept: Mapping[str, int], examples: int
) -> list[Layer]:
    """Return a layer for each module with parameters of its own, in the order of their first calls."""
    root, modules, done = type(model).__name__, dict(model.named_modules()), set[int]()
    found = []
    for path in dict.fromkeys([*order, *modules]):
        params = list(modules[path].parameters(recurse=False))
        own = [p for p in params if id(p) not in done and p.requires_grad]
        done.update(map(id, own))
        if params:
            operations = sum(flops.get(f"{root}.{path}" if path else root, {}).values())
            shapes = tuple(tuple(p.shape) for p in own)
            bytes_kept = kept.get(path, 0) / examples
            found.append(Layer(path or root, shapes, operations / examples, bytes_kept))
    rest = sum(flops.get("Global", {}).values()) / examples - sum(layer.flops for layer in found)
    if rest > 0:  # such as attention, which belongs to a module without parameters
        found.insert(len(found) // 2, Layer("operations without parameters", (), rest))
    return found


def bench_model(name: str, batch: int = 1, *, small: bool = False) -> Model:
    """Return one of the models of `bench step`: mlp, deep, transformer.

    Raises:
        InvalidArgument: there is no such model.
    """
    if name not in BATCHES:
        raise InvalidArgument(f"plan: model={shown(name)}; expected one of {', '.join(BATCHES)}")
    task = StepTask(name, batch, 1, small)
    return count(name, build(task), examples(task, 0)[0])


def model_from_function(text: str) -> Model:
    """Return the model of `file.py:function` or `package.module:function`.

    The function takes no arguments and returns (module, inputs): inputs is a tensor, or a tuple of them, with
    the examples of a batch in the first dimension.

    Raises:
        InvalidArgument: there is no such function, or it returns something else.
    """
    where, _, name = text.rpartition(":")
    function = getattr(_module(where), name, None) if where and name else None
    if not callable(function):
        raise InvalidArgument(f"plan: model={shown(text)}; expected such as train.py:make_model")
    with torch.device("meta"):
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InvalidArgument(f"plan: {text} returned {shown(made)}; expected (module, inputs)")
    model, inputs = made
    return count(name, model, *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))


def _module(where: str) -> Any:
    path = Path(where)
    if path.suffix != ".py":
        try:
            return importlib.import_module(where)
        except ImportError as exc:
            raise InvalidArgument(f"plan: cannot import {where}: {exc}") from exc
    if not path.is_file():
        raise InvalidArgument(f"plan: no such file: {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
