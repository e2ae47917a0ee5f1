"""A strategy, a compressor or an optimizer from a text such as `LocalSGD(8)`: for command lines."""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mpisgd
from mpisgd.arguments import check_text, shown
from mpisgd.compress.compressor import Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.methods.cast.cast import CASTS
from mpisgd.methods.strategy.goes_with import averages_by_itself
from mpisgd.methods.strategy.strategy import Strategy

__all__ = [
    "OptimizerChoice",
    "call_of",
    "compressor_from_text",
    "optimizer_from_text",
    "strategy_from_text",
]

AUTO = "auto"


@dataclass(frozen=True)
class OptimizerChoice:
    """What makes an optimizer of parameters.

    Attributes:
        kind: its class.
        options: what it is made with.
    """

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def make(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """Return the optimizer of `params`; `options` replace those of the choice."""
        return self.kind(params, **{**self.options, **options})


def strategy_from_text(text: str) -> Strategy:
    """Return the strategy that `mpisgd.<text>` would make; only a module of the user's own is run for it.

    Args:
        text: a name, or a call whose arguments are literals, torch's optimizer classes and dtypes by name, or
            such calls of `Offload`: `Synchronous`, `LocalSGD(8, warmup_steps=100)`,
            `DiLoCo(outer_optimizer=Adam)`, `Sharded(2, master_dtype=float32, offload=Offload("/scratch"))`.
            One of the user's own has its module before it, which is imported: `my_methods:BlockMomentum(4)`.

    Raises:
        InvalidArgument: it is not of this form, names no strategy, or has arguments that it does not take.
    """
    made = _made("strategy", text, mpisgd)
    if not isinstance(made, Strategy):
        raise InvalidArgument(f"strategy {shown(text)}: expected such as LocalSGD(8) or DiLoCo(100)")
    return made


def compressor_from_text(text: str) -> Compressor:
    """Return the compressor that `mpisgd.compress.<text>` would make; also of `none fp16 bf16 auto`.

    One may be in another: `PerHost(TopK(ratio=0.01))`, `PerHost(bf16)`.

    Raises:
        InvalidArgument: as for `strategy_from_text`.
    """
    if text in CASTS:
        return CASTS[text]
    from mpisgd import compress

    if text == AUTO:
        return compress.Auto()
    made = _made("compression", text, compress)
    if not isinstance(made, Compressor):
        raise InvalidArgument(f"compression {shown(text)}: expected such as fp16 or TopK(ratio=0.01)")
    return made


def optimizer_from_text(text: str) -> OptimizerChoice:
    """Return the choice of `torch.optim.<text>`, or of `mpisgd.<text>` as in `OneBitAdam(freeze_step=50)`.

    Args:
        text: a name, or a call whose arguments are literals by name: `SGD(lr=0.1, momentum=0.9)`.

    Raises:
        InvalidArgument: as for `strategy_from_text`.
    """
    name, arguments, options = call_of("optimizer", text)
    kind = getattr(torch.optim, name, None) or getattr(mpisgd, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or arguments:
        raise InvalidArgument(f"optimizer {shown(text)}: expected such as AdamW(lr=0.001)")
    try:
        inspect.signature(kind).bind(None, **options)
        if not averages_by_itself(kind):  # one that averages by itself is made by all ranks together
            kind([torch.zeros(1, requires_grad=True)], **options)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"optimizer {shown(text)}: {exc}") from exc
    return OptimizerChoice(kind, options)


def _made(what: str, text: str, module: Any) -> Any:
    own, colon, call = text.partition(":") if ":" in text.partition("(")[0] else ("", "", text)
    name, arguments, options = call_of(what, call)
    if colon:
        kind = getattr(_imported(what, text, own), name, None)
    else:
        kind = getattr(module, name) if name in module.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, (Strategy, Compressor)):
        raise InvalidArgument(f"{what} {shown(text)}: {name} is no {what}")
    try:
        return kind(*arguments, **options)
    except TypeError as exc:
        raise InvalidArgument(f"{what} {shown(text)}: {exc}") from exc


def _imported(what: str, text: str, name: str) -> Any:
    """Return a module of the user's, which may lie in the current folder, as for `python -m`."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, ValueError) as exc:
        raise InvalidArgument(f"{what} {shown(text)}: {exc}") from exc


def call_of(what: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the arguments and the options of a call, or of a name alone.

    Arguments are literals, or what `strategy_from_text` and `compressor_from_text` know inside of others.

    Raises:
        InvalidArgument: `text`, which is a `what`, is something else.
    """
    check_text(what, what, text)
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name):
            raise SyntaxError("expected a name, or a name with arguments in brackets")
        arguments, options = _arguments(call)
    except InvalidArgument:
        raise
    except (SyntaxError, TypeError, ValueError) as exc:
        raise InvalidArgument(f"{what} {shown(text)}: {exc}") from exc
    return call.func.id, arguments, options


def _arguments(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
    return [_value(arg) for arg in call.args], {str(kw.arg): _value(kw.value) for kw in call.keywords}


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, what a name means, or what a call inside of another makes."""
    if isinstance(node, ast.Name):
        found = _named(node.id)
        if found is not None:
            return found
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _nested(node.func.id)
        if kind is not None:
            arguments, options = _arguments(node)
            return kind(*arguments, **options)
    return _literal(node)


def _named(name: str) -> Any:
    """Return torch's optimizer class or dtype of this name, or the compression; None if there is none."""
    if name in CASTS:
        return CASTS[name]
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    found = getattr(torch.optim, name, None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def _nested(name: str) -> type | None:
    """Return the class that may be called as an argument: `Offload`, or a compressor; None for others."""
    from mpisgd import compress

    if name == "Offload":
        return mpisgd.Offload
    return getattr(compress, name) if name in compress.__all__ else None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no number, text or other literal") from None
