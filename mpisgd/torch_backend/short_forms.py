"""The short forms of a process group's methods: `pg.allreduce(tensor, op)`, `pg.broadcast(tensor, root)`.

torch's own groups take them beside the forms with an options object, as overloads in C++, and programs that
hold a group use them. Here a decorator turns them into the long form, so that each method has one signature.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch._C import _distributed_c10d as c10d

__all__ = ["with_short_forms"]

C = TypeVar("C", bound=type)


class Form(NamedTuple):
    """A method's short form.

    `options` is what its long form takes, after `num_tensors` tensors or lists of them; `fields` are what may
    stand in its place, in order.
    """

    options: Any
    num_tensors: int
    fields: tuple[str, ...]


FORMS = {
    "allreduce": Form(c10d.AllreduceOptions, 1, ("op", "timeout")),
    "broadcast": Form(c10d.BroadcastOptions, 1, ("root", "timeout")),
    "reduce": Form(c10d.ReduceOptions, 1, ("root", "op", "timeout")),
    "allgather": Form(c10d.AllgatherOptions, 2, ("timeout",)),
    "gather": Form(c10d.GatherOptions, 2, ("root", "timeout")),
    "scatter": Form(c10d.ScatterOptions, 2, ("root", "timeout")),
    "reduce_scatter": Form(c10d.ReduceScatterOptions, 2, ("op", "timeout")),
    "barrier": Form(c10d.BarrierOptions, 0, ("timeout",)),
}
IN_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def with_short_forms(cls: C) -> C:
    """Let a process group's methods be called in their short forms too, and without options.

    A `timeout` counts for a barrier; other operations wait as long as the group's limit says.
    """
    for name, form in FORMS.items():
        setattr(cls, name, _taking_both(getattr(cls, name), form))
    return cls


def _taking_both(method: Callable[..., Any], form: Form) -> Callable[..., Any]:
    @functools.wraps(method)
    def take(self: Any, *args: Any, opts: Any = None, **named: Any) -> Any:
        tensors, rest = args[: form.num_tensors], args[form.num_tensors :]
        if opts is None and rest and isinstance(rest[0], form.options):
            (opts,) = rest
        elif opts is None:
            opts = _options(form, rest, {name: named.pop(name) for name in IN_OPTIONS if name in named})
        return method(self, *_in_lists(tensors), opts=opts, **named)

    return take


def _options(form: Form, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    options = form.options()
    for name, value in (*zip(form.fields, positional, strict=False), *named.items()):
        if value is not None:
            setattr(options, IN_OPTIONS[name], value)
    return options


def _in_lists(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return outputs and inputs as lists, where one is a tensor and the other a list with one per rank."""
    alone = any(isinstance(entry, Tensor) for entry in tensors)
    return tuple([entry] for entry in tensors) if alone else tensors
