"""`LockFree`: all ranks of a host update one copy of the parameters at the same time, without any lock.

Hogwild (Recht et al. 2011); x: the parameters in shared memory, i: their elements, a: the learning rate.

    g <- gradient at x, read while others write
    x[i] <- x[i] - a g[i]    for every element of g, read and written without a lock

Where two ranks update an element at the same time one of the updates may be lost; with sparse gradients that
is rare. Each rank's optimizer keeps a state of its own. With n ranks and op=AVG each gradient counts 1/n.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.methods.parameter_server.layout import PARAMETER, lay_out_shards
from mpisgd.methods.parameter_server.worker import Worker
from mpisgd.rma.window import Window

__all__ = ["LockFree"]


class LockFree(Worker):
    """Puts the parameters into the first rank's memory of a window, and scales gradients around a step."""

    def open(self) -> None:
        """See `Worker`."""
        super().open()
        group, named = self.training.group, self.training.named
        schemas = [{PARAMETER: (tuple(param.shape), param.dtype)} for _, param in named]
        (layout,) = lay_out_shards(schemas, 1, group.size)
        nbytes = layout.version_bytes if group.rank == 0 else 0
        self._window = Window(torch.zeros(nbytes, dtype=torch.uint8), group)
        memory = self._window.local(group.ranks[0])
        assert memory is not None
        self._shared = [
            memory[entry.start :][: entry.dtype.itemsize * named[entry.param][1].numel()]
            .view(entry.dtype)
            .view(entry.shape)
            for entry in sorted(layout.entries, key=lambda entry: entry.param)
        ]
        # By parameter, in a step: the gradient of the program, and what the optimizer sees instead.
        self._own_grads: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def _publish(self) -> None:
        for tensor, (_, param) in zip(self._shared, self.training.named, strict=True):
            tensor.copy_(param)

    @torch.no_grad()
    def pull(self) -> None:
        """Let the parameters be the memory that all ranks share."""
        self._publish_once()
        self._share()

    def _share(self) -> None:
        """Give the parameters their shared memory, where they have none yet or a program has moved them."""
        for tensor, (_, param) in zip(self._shared, self.training.named, strict=True):
            if param.data_ptr() != tensor.data_ptr():
                param.data = tensor

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Refuse: gradients that the optimizer asks for in the middle of its step would count whole."""
        raise InvalidArgument("ParameterServer: step(closure) goes with locked=True")

    def before_step(self) -> None:
        """Wait where the staleness is bounded, and let gradients count what they are to count."""
        self.end_failed_step()
        self._scaling.before_step(self.training.optimizer)
        self._begin_update()
        self._share()
        self._count_push(complete=False)
        if self.scale != 1.0:
            for _, param in self.training.named:
                if (own := param.grad) is not None:
                    param.grad = own * self.scale
                    self._own_grads.append((param, own, param.grad))

    def after_step(self, num_steps: int) -> None:
        """Count the update, and give the program its gradients back."""
        self._give_back()
        self._scaling.after_step()
        self._count_push(complete=True)
        self._end_update()
        self._go_on()

    def end_failed_step(self) -> None:
        """Give the program its gradients back: a step on them once more would count them less."""
        self._give_back()

    def _give_back(self) -> None:
        for param, own, scaled in self._own_grads:
            if param.grad is scaled:
                param.grad = own
        self._own_grads = []

    def close(self) -> None:
        """Give the parameters memory of their own."""
        if self._own_grads:
            raise InvalidArgument("ParameterServer: parameters cannot change in the middle of a step")
        for _, param in self.training.named:
            param.data = param.detach().clone()
