"""`Trainer`: what a mode trains with on this rank: groups, batches and the loop over the steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpisgd
from mpisgd.core.group import Group
from mpisgd.methods.sharded.forward_overlap import wait_for_parameters
from mpisgd.tools.verification.paper_run import needs_closure
from mpisgd.tools.verification.problem import Batch, Problem, flat_parameters
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["Trainer"]

WRONG = -1.5


class Trainer:
    """This rank's part of a training of one mode.

    Args:
        problem: what is trained.
        sabotage: what is to go wrong.
        stale_gradients: of what is stale, gradients are, not parameters: where these do not matter.

    Attributes:
        rank: in the group of all ranks.
        is_idle: whether it should have made parameters stale of which this rank has none.
    """

    def __init__(
        self, problem: Problem, sabotage: Sabotage = Sabotage.NONE, *, stale_gradients: bool = False
    ) -> None:
        self.problem = problem
        self.sabotage = sabotage
        self.stale_gradients = stale_gradients
        self.rank = mpisgd.rank()
        self.is_idle = False
        self._previous: Tensor | None = None
        self._num_steps = 0

    @property
    def _is_wrong(self) -> bool:
        return self.rank == self.problem.size - 1

    def group(self) -> Group | None:
        """Return the group that trains, None for all ranks. Collective."""
        return self.alone() if self.sabotage is Sabotage.NO_COMMUNICATION else None

    def smaller_group(self) -> Group | None:
        """Return the group of all ranks but the last; None on that one. Collective."""
        others = mpisgd.new_group(range(self.problem.size - 1))
        alone = self.alone() if self.sabotage is Sabotage.NO_COMMUNICATION else None
        return (alone or others) if others.rank >= 0 else None

    def alone(self) -> Group:
        """Return a group of this rank only. Collective."""
        return [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][self.rank]

    def process_group(self) -> dist.ProcessGroup | None:
        """Return torch's group that trains, None for all ranks. Collective."""
        if self.sabotage is not Sabotage.NO_COMMUNICATION:
            return None
        groups: list[dist.ProcessGroup] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return groups[self.rank]

    def batch(self, step: int, rank: int | None = None, size: int | None = None) -> Batch:
        """Return this rank's share of a step's batch, or that of another `rank` among `size`."""
        wrong = self.sabotage is Sabotage.OTHER_DATA and self._is_wrong
        if self.stale_gradients and self.sabotage is Sabotage.STALE and self._is_wrong:
            step = 0 if step == 1 else step
        return self.problem.share(step, self.rank if rank is None else rank, size, other=wrong)

    def loss(self, forward: Any, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        loss = self.problem.loss(forward, batch)
        return loss * WRONG if self.sabotage is Sabotage.WRONG_SCALE and self._is_wrong else loss

    def end_step(self, params: Sequence[Tensor]) -> None:
        """Call after each step with the parameters that this rank has in its memory."""
        if self.sabotage is not Sabotage.STALE or not self._is_wrong or self.stale_gradients:
            return
        values = torch.cat([param.detach().flatten() for param in params])
        self.is_idle = not values.numel()
        self._num_steps += 1
        if self._num_steps == 2 and self._previous is not None:
            before = torch.split(self._previous, [param.numel() for param in params])
            with torch.no_grad():
                for param, old in zip(params, before, strict=True):
                    param.copy_(old.view(param.shape))
        self._previous = values

    def step(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        """Train one step, with the share of this rank, or of another `rank`, among `size`."""
        optimizer.zero_grad()
        torch.autograd.backward(self.loss(model, self.batch(step, rank, size)))
        optimizer.step()
        self.end_step(list(model.parameters()))

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        forward: Any = None,
        backward: Callable[[Tensor], None] = torch.autograd.backward,
        before_step: Callable[[], object] = lambda: None,
        first: int = 0,
        last: int | None = None,
        parts: int = 1,
    ) -> list[Tensor]:
        """Train some steps; return the parameters after each.

        Args:
            model: whose parameters are looked at.
            optimizer: of them.
            forward: what is called, the model by default.
            backward: of the loss.
            before_step: called between backward and step.
            first: the step to begin with.
            last: the step before which to end, all by default.
            parts: backward passes per step, each with an equal part of the share.
        """
        rows = []
        for step in range(first, self.problem.steps if last is None else last):

            def evaluate(step: int = step) -> float:
                optimizer.zero_grad()
                chunks = [part.chunk(parts) for part in self.batch(step)]
                total = 0.0
                for batch in zip(*chunks, strict=True):
                    loss = self.loss(forward or model, batch) / parts
                    backward(loss)
                    total += float(loss.detach())
                before_step()
                return total

            if needs_closure(optimizer):
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            wait_for_parameters()
            self.end_step(list(model.parameters()))
            rows.append(flat_parameters(model))
        return rows
