"""`ForwardOverlap`: parameters arrive while the next forward computes; each layer waits for its own.

    step           the ranks send what they have updated: first layers ......... last layers
    next forward                                             layer 1   layer 2   layer 3

A hook that torch calls before the forward of every module waits for the parameters of this module. A module
may also use parameters of modules inside it without calling these (`torch.nn.MultiheadAttention` does), so it
waits for theirs, too, unless they have been seen to be called. Which it calls may be others in evaluation
(`torch.nn.TransformerEncoderLayer` has a fused kernel there), where no gradient would tell of a mistake: so
there it waits for all that is inside it.

On a device it is the current stream that waits, so each stream in which a program computes waits for itself.
"""

import collections
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from mpisgd.accelerator.runtime import on_device, runtime
from mpisgd.core.work import Work
from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.job.job_of_thread import job_place

__all__ = ["ForwardOverlap", "wait_for_parameters"]

Module = torch.nn.Module


class _Overlaps(weakref.WeakValueDictionary[int, "ForwardOverlap"]):
    """Those of a rank, by number, in the order in which they were made: all ranks wait for them in that."""

    num_made = 0

    def add(self, overlap: "ForwardOverlap") -> None:
        """Add one."""
        self.num_made += 1
        self[self.num_made] = overlap


def wait_for_parameters() -> None:
    """Return when no parameters are under way: for functions that read those of any model."""
    for overlap in list(job_place().own(_Overlaps).values()):
        overlap.wait()


class ForwardOverlap:
    """What is under way, and which parameters are in it.

    Args:
        named: all parameters that may be, with names; see `cover`.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._place_of: dict[Tensor, int] = {}  # by identity: tensors hash so
        self._works: list[Work] = []
        self._waited_for: set[Tensor] = set()
        self._num_waited: collections.Counter[Any] = collections.Counter()  # by stream
        self._called: weakref.WeakSet[Module] = weakref.WeakSet()
        self._names: dict[Tensor, str] = {}
        self._too_early: list[str] = []  # parameters with gradients, that nobody has waited for
        self._alive = weakref.ref(self)
        alive = self._alive

        def before_forward(module: Module, _: Any) -> None:
            if (overlap := alive()) is not None:
                overlap._before_forward(module)

        handle = register_module_forward_pre_hook(before_forward)
        weakref.finalize(self, handle.remove)
        job_place().own(_Overlaps).add(self)
        self.cover(named)

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a list that has grown at its end."""
        for name, param in named[len(self._names) :]:
            self._names[param] = name
            _when_accumulated(param, self._alive)

    def expect(self, params: Sequence[Tensor], work: Work) -> None:
        """Note what brings some parameters; what was expected before arrives before it."""
        self._works.append(work)
        self._place_of.update(dict.fromkeys(params, len(self._works) - 1))

    def wait(self) -> None:
        """Return when everything has arrived."""
        self._wait_for(len(self._works) - 1)
        self.forget()

    def wait_for_first(self) -> None:
        """Return when all ranks have begun to send."""
        self._wait_for(min(0, len(self._works) - 1))

    def settle(self) -> None:
        """Return when nothing arrives any more; `wait` raises what went wrong."""
        for work in self._works:
            with contextlib.suppress(MpisgdError):
                work.wait()

    def forget(self) -> None:
        """Expect nothing any more: all has arrived, or its ranks are lost."""
        self._works.clear()
        self._place_of.clear()
        self._waited_for.clear()
        self._num_waited.clear()

    def check_used(self) -> None:
        """Raise if this rank has computed a gradient of a parameter without waiting for it.

        Raises:
            InvalidArgument: names it.
        """
        names, self._too_early = self._too_early, []
        if names:
            raise InvalidArgument(
                f"Sharded: {names[0]} was used, maybe before it had arrived, outside of the forward "
                "of a module that has it; pass overlap_forward=False"
            )

    def _accumulated(self, param: Tensor) -> None:
        if param in self._place_of and param not in self._waited_for:
            self._too_early.append(self._names[param])

    def _wait_for(self, place: int) -> None:
        stream = self._current_stream()
        while self._num_waited[stream] <= place:
            self._works[self._num_waited[stream]].wait()
            self._num_waited[stream] += 1

    def _current_stream(self) -> Any:
        """Return the stream that waits; None where that is the host."""
        param = next(iter(self._names), None)
        if param is None or not on_device(param):
            return None
        return runtime().current_stream(param.device)

    def _before_forward(self, module: Module) -> None:
        if module not in self._called:  # also before the first step: somebody may save what comes then
            self._called.add(module)
            if any(param in self._names for param in module.parameters()):
                _watch(module, self._alive)
        if not self._works:
            return
        trains = module.training and torch.is_grad_enabled()
        inside = self._used_by(module) if trains else module.parameters()
        used = [param for param in inside if param in self._place_of]
        self._waited_for.update(used)
        self._wait_for(max((self._place_of[param] for param in used), default=-1))

    def _used_by(self, module: Module) -> Iterator[Tensor]:
        """Yield the parameters that a module may use before another module's forward is called."""
        yield from (param for param in module._parameters.values() if param is not None)
        for child in module._modules.values():
            if child is not None and child not in self._called:
                yield from self._used_by(child)


def _when_accumulated(param: Tensor, overlap: "weakref.ref[ForwardOverlap]") -> None:
    """Tell `overlap` of each gradient of a parameter that backward computes on this rank."""

    def note(param: Tensor) -> None:
        if (alive := overlap()) is not None:
            alive._accumulated(param)

    trainable = param.requires_grad
    param.requires_grad_(True)  # torch refuses hooks on what is frozen, but keeps what is there
    param.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    param.requires_grad_(trainable)


def _watch(module: Module, overlap: "weakref.ref[ForwardOverlap]") -> None:
    """Let whoever saves a module, or loads it, wait for what is under way."""

    def before_save(*_: Any) -> None:
        if (alive := overlap()) is not None:
            alive.wait()

    def before_load(*_: Any) -> None:
        if (alive := overlap()) is not None:  # else it would arrive in what was loaded
            alive.settle()

    module.register_state_dict_pre_hook(before_save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(before_load)  # type: ignore[no-untyped-call]
