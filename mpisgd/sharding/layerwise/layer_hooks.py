"""When a layer is in memory: hooks around forward, before backward, and when its gradients are there."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpisgd.gradients.backward_hooks import backward_depth
from mpisgd.gradients.hook_order import coming_last, moved_to_end
from mpisgd.sharding.layerwise.parameter_unit import Unit
from mpisgd.sharding.layerwise.streamed_parameters import StreamedParameters

__all__ = ["BackwardPass", "LayerHooks"]

FORWARD, BACKWARD = "forward", "backward"
NO_TASK = -1

_current_task = torch._C._current_graph_task_id


class BackwardPass:
    """Takes the gradients of units away as they become complete, on all ranks in the same order.

    That is the order of the layers, backwards. What has come out of order, or once more, is taken when
    backward ends: reentrant checkpointing runs a backward inside a backward, and a layer that is used twice
    gets a gradient from each.

        backward    task 7 ............................................. end: all that is left is taken
                        task 8, inside: gradients of 1 | task 9: of 0, 1

    Args:
        streamed: the units, all of them.
    """

    def __init__(self, streamed: StreamedParameters) -> None:
        self._streamed = streamed
        self._order = streamed.units[::-1]
        self._next = 0
        self._tasks: list[int] = []  # autograd's numbers of the passes under way, the outermost first
        streamed.when_reset = self.reset
        for unit in streamed.units:
            for k, param in enumerate(unit.params):
                _when_accumulated(param, self, unit, k)

    def begin(self) -> None:
        """Note that a backward is under way."""
        task = _current_task()
        if task in self._tasks:
            return
        if backward_depth() < 2:
            self.reset()
        self._tasks.append(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))

    def reset(self) -> None:
        """Forget a pass that was left by an exception; its gradients stay where they are."""
        self._tasks.clear()
        self._next = 0
        for unit in self._order:
            unit.arrived.clear()
        self._streamed.release(self._order, BACKWARD)

    def reset_outside(self) -> None:
        """Do so if no backward is under way in this thread."""
        if self._tasks and _current_task() == NO_TASK:
            self.reset()

    def arrived(self, unit: Unit, k: int) -> None:
        """Note that the gradient of the k-th parameter of a unit is complete."""
        self.begin()
        unit.arrived.add(k)
        while self._next < len(self._order) and _is_complete(self._order[self._next]):
            self._finish(self._order[self._next])
            self._next += 1

    def _finish(self, unit: Unit) -> None:
        if any(param.requires_grad for param in unit.params):
            self._streamed.harvest(unit)
        unit.arrived.clear()
        if unit.is_trainable:
            self._streamed.release([unit], BACKWARD)

    def _end(self, task: int) -> None:
        if task not in self._tasks:
            return
        self._tasks.remove(task)
        if not self._tasks:  # otherwise the backward around this one goes on
            self._streamed.harvest_rest(self._order)
            self.reset()


def _is_complete(unit: Unit) -> bool:
    return all(k in unit.arrived for k, param in enumerate(unit.params) if param.requires_grad)


def _when_accumulated(param: Tensor, backward: BackwardPass, unit: Unit, k: int) -> None:
    """Have `arrived` called for a parameter, also if it is frozen now."""

    def hook(param: Tensor) -> None:
        if moved_to_end(param, handle):
            backward.begin()  # at its end the gradient is taken
        else:
            backward.arrived(unit, k)

    trainable = param.requires_grad
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(coming_last(hook))  # type: ignore[no-untyped-call]
    param.requires_grad_(trainable)


class LayerHooks:
    """Has the units of a layer in memory while it computes.

    Args:
        layer: the module.
        units: what it uses.
        streamed: brings them into memory.
        backward: of the model.
    """

    def __init__(
        self, layer: nn.Module, units: Sequence[Unit], streamed: StreamedParameters, backward: BackwardPass
    ) -> None:
        self._units, self._streamed, self._backward = units, streamed, backward
        self._forward = (FORWARD, id(layer))
        layer.register_forward_pre_hook(self._before_forward)
        layer.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)

    def _before_forward(self, _: nn.Module, __: Any) -> None:
        self._backward.reset_outside()
        self._streamed.acquire(self._units, self._forward)

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _differentiable(output):
                tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
            self._release_frozen(list(_differentiable((args, kwargs))))
        self._streamed.release(self._units, self._forward)

    def _before_backward(self, _: Tensor) -> None:
        self._backward.begin()
        self._streamed.acquire(self._units, BACKWARD)

    def _release_frozen(self, inputs: Sequence[Tensor]) -> None:
        """Have what is frozen leave memory when the gradients of the layer's inputs are known."""
        frozen = [unit for unit in self._units if not unit.is_trainable]
        if frozen and inputs:
            torch.autograd.graph.register_multi_grad_hook(
                inputs, lambda _: self._streamed.release(frozen, BACKWARD)
            )


def _differentiable(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)
