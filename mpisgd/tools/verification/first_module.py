"""`locate`: the module in which the step of a training begins to differ from that of one process.

Both compute one step from the parameters that one process has before it, and note what goes into every module
and comes out of it, the loss, and the gradients of all these. The first that differs, in the order in which
they are computed, says where the fault is (the idea is TTrace's):

    what comes out of a module      and all before it is equal: the module itself
    what goes into a module         the code of the module around it, which called it
    the loss                        the loss, which is not the mean over the examples
    a gradient of what went in      the backward of the module
    a gradient of what came out     the backward of the module around it, or of the loss
    a gradient after the reduction  the module of that parameter: a hook, or the reduction
    nothing of these                the update: the optimizer, or the strategy
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.tools.verification.problem import Batch, Loss

__all__ = ["Place", "Recording", "locate", "record", "record_step"]

FORWARD, LOSS, BACKWARD, REDUCED = range(4)


class Place(NamedTuple):
    """Where a training begins to differ.

    Attributes:
        module: its name in the model; "" for the model itself, or where it is none.
        what: of it, in words; "" where nothing that was noted differs.
    """

    module: str = ""
    what: str = ""


class _Seen(NamedTuple):
    """A tensor that went into a module or came out of it, in a call of the module that called it."""

    module: str
    caller: str
    comes_out: bool
    value: Tensor
    grads: list[Tensor]  # of it, once there is one


class Recording:
    """What one step has computed.

    Attributes:
        seen: in the order in which it was computed.
        loss: the loss, None until it is known.
        grads: by name, of the parameters.
    """

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self.loss: Tensor | None = None
        self.grads: dict[str, Tensor] = {}

    def keep_loss(self, loss: Tensor) -> None:
        """Note the loss, the first one where a closure evaluates several."""
        if self.loss is None:
            self.loss = loss.detach()

    def keep_gradients(self, model: nn.Module) -> None:
        """Note the gradients of the parameters as they are now, the first time."""
        self.grads = self.grads or {
            name: param.grad.detach().clone()
            for name, param in model.named_parameters()
            if param.grad is not None and not param.grad.is_sparse
        }


@contextmanager
def record(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Note what the modules of a model compute inside."""
    callers: list[str] = []
    handles = []

    def note(values: Any, module: str, caller: str, *, comes_out: bool) -> None:
        for value in _tensors(values):
            grads: list[Tensor] = []
            recording.seen.append(_Seen(module, caller, comes_out, value.detach().clone(), grads))
            if value.requires_grad:
                value.register_hook(_keeps(grads))  # type: ignore[no-untyped-call]

    for name, module in model.named_modules():

        def begins(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            note((args, kwargs), name, callers[-1] if callers else "", comes_out=False)
            callers.append(name)

        def ends(_: nn.Module, __: Any, result: Any, name: str = name) -> None:
            callers.pop()
            note(result, name, callers[-1] if callers else "", comes_out=True)

        handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        handles.append(module.register_forward_hook(ends))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeps(grads: list[Tensor]) -> Any:
    return lambda grad: grads.append(grad.detach().clone())


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested tuples, lists and dicts, as Hugging Face's models give."""
    if isinstance(values, Tensor):
        if values.is_floating_point() and values.layout is torch.strided:
            yield values
    elif isinstance(values, dict):
        yield from itertools.chain.from_iterable(map(_tensors, values.values()))
    elif isinstance(values, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_tensors, values))


def record_step(model: nn.Module, loss: Loss, batch: Batch) -> Recording:
    """Return the outputs and gradients of modules in a step of one process, without the update."""
    recording = Recording()
    with record(model, recording):
        value = loss(model, batch)
    recording.keep_loss(value)
    torch.autograd.backward(value)
    recording.keep_gradients(model)
    return recording


def locate(mine: Recording, expected: Recording, *, joined: bool, factor: float | None) -> Place:
    """Return where what this and the other ranks have computed begins to differ. Collective.

    Args:
        mine: of this rank.
        expected: of one process: of the joined batch, or of this rank's share.
        joined: which of these.
        factor: of the gradients of the parameters, after the reduction, to those of one process; None: these
            cannot be compared.
    """
    found: list[Any] = [None] * mpisgd.size()
    losses: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(losses, float("nan") if mine.loss is None else float(mine.loss))
    part = _Part(mpisgd.rank(), mpisgd.size()) if joined else _Part(0, 1)
    mean = sum(losses) / len(losses) if joined else losses[mpisgd.rank()]
    mpisgd.all_gather_object(found, _first_difference(mine, expected, part, mean, factor))
    first = [(when, rank, place) for rank, each in enumerate(found) if each for when, place in [each]]
    if not first:
        return Place()
    _, rank, place = min(first)
    return Place(place.module, f"{place.what}, on rank {rank}" if len(first) < len(found) else place.what)


class _Part(NamedTuple):
    """The share of a rank in a joined batch."""

    rank: int
    size: int

    def of(self, whole: Tensor, like: Tensor) -> Tensor | None:
        """Return the part of `whole` that is this rank's, of the shape of `like`; None if it has none."""
        if whole.shape == like.shape:
            return whole
        longer = [d for d in range(min(whole.dim(), like.dim())) if whole.shape[d] != like.shape[d]]
        if whole.dim() == like.dim() and len(longer) == 1:
            (d,) = longer
            if whole.shape[d] == like.shape[d] * self.size:
                return whole.narrow(d, self.rank * like.shape[d], like.shape[d])
        return None


def _first_difference(
    mine: Recording, expected: Recording, part: _Part, mean_loss: float, factor: float | None
) -> tuple[tuple[int, int], Place] | None:
    """Return when this rank's first difference is computed, and where."""
    for index, (seen, other) in enumerate(zip(mine.seen, expected.seen, strict=False)):
        if seen[:3] != other[:3]:
            return (FORWARD, index), Place(seen.caller, "its calls of other modules")
        if _differs(seen.value, part.of(other.value, seen.value)):
            if seen.comes_out:
                return (FORWARD, index), Place(seen.module, "what comes out of it")
            return (FORWARD, index), Place(seen.caller, f"what it puts into {seen.module or 'the model'!r}")
    assert expected.loss is not None
    if _differs(expected.loss.new_tensor(mean_loss), expected.loss):
        return (LOSS, 0), Place("", "the loss: that of the joined batch is not the mean of all ranks'")
    pairs = list(zip(mine.seen, expected.seen, strict=False))
    for index, (seen, other) in reversed(list(enumerate(pairs))):
        if _gradient_differs(seen, other, part):
            place = Place(seen.caller, f"backward, between {seen.module!r} and what follows")
            if not seen.comes_out:
                place = Place(seen.module, "its backward")
            return (BACKWARD, -index), place
    if factor is None:
        return None
    for index, name in enumerate(reversed(expected.grads)):
        if name in mine.grads and _differs(mine.grads[name], factor * expected.grads[name]):
            return (REDUCED, index), Place(name.rpartition(".")[0], f"the reduced gradient of {name!r}")
    return None


def _gradient_differs(seen: _Seen, other: _Seen, part: _Part) -> bool:
    if len(seen.grads) != len(other.grads):
        return True
    if not seen.grads:
        return False
    whole = other.grads[0]
    if part.size > 1 and whole.shape == seen.grads[0].shape:
        return False  # it has no examples: each rank's may be another one
    mine = part.of(whole, seen.grads[0])
    return _differs(seen.grads[0], None if mine is None else mine * part.size)


def _differs(mine: Tensor, expected: Tensor | None) -> bool:
    """Return whether two tensors differ by more than rounding; False where they cannot be compared."""
    if expected is None or not mine.numel():
        return False
    apart = float((mine.double() - expected.double()).abs().max())
    return not apart <= torch.finfo(mine.dtype).eps ** 0.5 * max(float(expected.double().abs().max()), 1e-30)
