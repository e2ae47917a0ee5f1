"""A `Model` of a torch module, counted on the meta device: nothing is computed there, nor takes memory."""

import copy
import fnmatch
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpisgd.arguments import printable, shown
from mpisgd.errors import InvalidArgument
from mpisgd.layouts.named_model import NamedModel
from mpisgd.tools.bench.cases import BATCHES
from mpisgd.tools.bench.training import StepTask, build, examples
from mpisgd.tools.plan.models.model import Layer, Model
from mpisgd.tools.plan.models.saved_bytes import SavedBytes

__all__ = ["bench_model", "count", "model_from_function"]


# What tensor parallelism adds up in a block of torch: behind attention, and behind the feed-forward layers.
ALL_REDUCES: dict[type[nn.Module], int] = {nn.TransformerEncoderLayer: 2, nn.TransformerDecoderLayer: 3}
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LISTS = (nn.ModuleList, nn.ModuleDict)


def count(
    name: str, model: nn.Module, *inputs: Tensor, all_reduces: Mapping[str, int] | None = None
) -> Model:
    """Return the layers of a module that have parameters of their own, in the order in which they are called.

    A layer that is called several times counts once, with the operations of all its calls. Operations are
    those that torch's FlopCounterMode knows: products of matrices, convolutions, attention.

    Args:
        name: for tables.
        model: any module; a copy of it without memory is called.
        inputs: what it is called with, a batch of examples in the first dimension.
        all_reduces: see `Block`, by the names of blocks, in which * stands for anything; of torch's own
            transformer layers they are known.
    """
    examples = max(1, len(inputs[0]))
    bare = _on_meta(model)
    order: list[str] = []
    blocks = _Blocks(bare, all_reduces or {})
    hooks = [
        module.register_forward_pre_hook(_note(path, order))
        for path, module in bare.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    counter = FlopCounterMode(display=False)
    with counter, SavedBytes(lambda: order[-1] if order else "") as saved:
        bare(*(each.to("meta") for each in inputs))
    for hook in [*hooks, *blocks.hooks]:
        hook.remove()
    layers = _layers(bare, order, counter.get_flop_counts(), saved.by_place, examples, blocks)
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


class _Blocks:
    """The parts of a module that no pipeline cuts: what is listed in it, or else its children.

    Attributes:
        hooks: that note what the blocks return.
        output_bytes: of each, by its path.
    """

    def __init__(self, model: nn.Module, all_reduces: Mapping[str, int]) -> None:
        self._modules, self._all_reduces = dict(model.named_modules()), all_reduces
        self.output_bytes: dict[str, int] = {}
        own = (path for path, module in self._modules.items() if list(module.parameters(recurse=False)))
        paths = set(map(self.of, own))
        self.hooks = [self._modules[path].register_forward_hook(self._note(path)) for path in paths]

    def of(self, path: str) -> str:
        """Return the block of a module: it is no list of modules, and has none in it."""
        parts = path.split(".")
        for end in range(1, len(parts)):
            found = self._modules[".".join(parts[:end])]
            lists = any(isinstance(inner, LISTS) for inner in found.modules())
            if not isinstance(found, CONTAINERS) and not lists:
                return ".".join(parts[:end])
        return path

    def all_reduces(self, path: str) -> int:
        """Return how many of them tensor parallelism needs in a block."""
        named = (n for pattern, n in self._all_reduces.items() if fnmatch.fnmatchcase(path, pattern))
        return next(named, ALL_REDUCES.get(type(self._modules[path]), 0))

    def _note(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            self.output_bytes[path] = sum(each.nbytes for each in outputs if isinstance(each, Tensor))

        return hook


def _layers(
    model: nn.Module, order: list[str], flops: Any, kept: Mapping[str, int], examples: int, blocks: _Blocks
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
            found.append(
                Layer(path or root, shapes, operations / examples, bytes_kept, block=blocks.of(path))
            )
    groups: dict[str, list[Layer]] = {}
    for layer in found:  # those that are not called by themselves are with the others of their block
        groups.setdefault(layer.block, []).append(layer)
    found = [
        each
        for block, group in groups.items()
        for each in _whole_block(group, flops.get(f"{root}.{block}", {}), blocks, examples)
    ]
    rest = sum(flops.get("Global", {}).values()) / examples - sum(layer.flops for layer in found)
    if rest > 0:  # of modules that are in no block
        found.insert(len(found) // 2, Layer(NO_PARAMETERS, (), rest, block=found[len(found) // 2].block))
    return found


NO_PARAMETERS = "operations without parameters"


def _whole_block(
    layers: list[Layer], flops: Mapping[Any, int], blocks: _Blocks, examples: int
) -> list[Layer]:
    """Return the layers of a block, with those of its operations that are of none, such as attention."""
    block = layers[0].block
    rest = sum(flops.values()) / examples - sum(layer.flops for layer in layers)
    if rest > 0:
        layers.insert(len(layers) // 2, Layer(f"{block}: {NO_PARAMETERS}", (), rest, block=block))
    nbytes = blocks.output_bytes.get(block, 0) / examples
    layers[-1] = replace(layers[-1], output_bytes=nbytes, all_reduces=blocks.all_reduces(block))
    return layers


def bench_model(name: str, *, small: bool = False) -> Model:
    """Return one of the models of `bench step`: mlp, deep, transformer.

    Raises:
        InvalidArgument: there is no such model.
    """
    if name not in BATCHES:
        raise InvalidArgument(f"plan: model={shown(name)}; expected one of {', '.join(BATCHES)}")
    task = StepTask(name, 1, 1, small)
    return count(name, build(task), examples(task, 0)[0])


def model_from_function(text: str) -> Model:
    """Return the model of `file.py:function` or `package.module:function`.

    The function takes no arguments and returns (module, inputs): inputs is a tensor, or a tuple of them, with
    the examples of a batch in the first dimension. A third value says which blocks tensor parallelism can
    divide, such as {"blocks.*": 2}; see `Block`. Or it returns a `mpisgd.NamedModel`, for layouts.

    Raises:
        InvalidArgument: there is no such function, it fails, or it returns something else.
    """
    try:
        return _model_from_function(text)
    except InvalidArgument:
        raise
    except (Exception, SystemExit) as exc:  # of the user's program, whatever it is
        said = printable(str(exc).partition("\n")[0])
        raise InvalidArgument(f"plan: model={shown(text)}: {type(exc).__name__}: {said}") from exc


def _model_from_function(text: str) -> Model:
    where, _, name = text.rpartition(":")
    function = getattr(_module(where), name, None) if where and name else None
    if not callable(function):
        raise InvalidArgument(f"plan: model={shown(text)}; expected such as train.py:make_model")
    with torch.device("meta"):
        made = function()
    if isinstance(made, NamedModel):
        return replace(count(name, made.model, *made.example), named=made)
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise InvalidArgument(
            f"plan: {text} returned {shown(made)}; expected (module, inputs) or a NamedModel"
        )
    model, inputs, all_reduces = (*made, None)[:3]
    tensors = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return count(name, model, *tensors, all_reduces=all_reduces)


def _module(where: str) -> Any:
    path = Path(where)
    if path.suffix != ".py":
        return importlib.import_module(where)
    if not path.is_file():
        raise InvalidArgument(f"plan: no such file: {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
