"""A strategy, a compressor or an optimizer from a text such as `LocalSGD(8)`: for command lines."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mpisgd
from mpisgd.arguments import check_text, shown
from mpisgd.compress.compressor import Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.strategies.strategy import Strategy

__all__ = ["OptimizerChoice", "compressor_from_text", "optimizer_from_text", "strategy_from_text"]

CASTS = ("none", "fp16", "bf16")


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
    """Return the strategy that `mpisgd.<text>` would make, without running anything else.

    Args:
        text: a name, or a call whose arguments are literals or torch's optimizer classes by name:
            `Synchronous`, `LocalSGD(8, warmup_steps=100)`, `DiLoCo(outer_optimizer=Adam)`.

    Raises:
        InvalidArgument: it is not of this form, names no strategy, or has arguments that it does not take.
    """
    made = _made("strategy", text, mpisgd)
    if not isinstance(made, Strategy):
        raise InvalidArgument(f"strategy {shown(text)}: expected such as LocalSGD(8) or DiLoCo(100)")
    return made


def compressor_from_text(text: str) -> Compressor:
    """Return the compressor that `mpisgd.compress.<text>` would make, or that `none`, `fp16`, `bf16` name.

    Raises:
        InvalidArgument: as for `strategy_from_text`.
    """
    if text in CASTS:
        cast: Compressor = getattr(mpisgd.Compression, text)
        return cast
    from mpisgd import compress

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
    name, arguments, options = _parsed("optimizer", text)
    kind = getattr(torch.optim, name, None) or getattr(mpisgd, name, None)
    own = isinstance(kind, type) and getattr(kind, "averages_in_step", False)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or arguments:
        raise InvalidArgument(f"optimizer {shown(text)}: expected such as AdamW(lr=0.001)")
    try:
        inspect.signature(kind).bind(None, **options)
        if not own:  # one that averages by itself is made by all ranks together
            kind([torch.zeros(1, requires_grad=True)], **options)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"optimizer {shown(text)}: {exc}") from exc
    return OptimizerChoice(kind, options)


def _parsed(what: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the arguments, and those by name, of a call."""
    check_text(what, what, text)
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name):
            raise SyntaxError("expected a name, or a name with arguments in brackets")
        arguments = [_literal(argument) for argument in call.args]
        options = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as exc:
        raise InvalidArgument(f"{what} {shown(text)}: {exc}") from exc
    return call.func.id, arguments, options


def _made(what: str, text: str, module: Any) -> Any:
    name, arguments, options = _parsed(what, text)
    kind = getattr(module, name) if name in module.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, (Strategy, Compressor)):
        raise InvalidArgument(f"{what} {shown(text)}: {name} is no {what}")
    try:
        return kind(*arguments, **options)
    except TypeError as exc:
        raise InvalidArgument(f"{what} {shown(text)}: {exc}") from exc


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or the optimizer class of torch's that a name means."""
    if isinstance(node, ast.Name):
        found = getattr(torch.optim, node.id, None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            return found
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no number, text or other literal") from None
