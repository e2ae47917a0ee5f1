"""`Trainee`: what a mode trains with on this rank: groups, batches and the loop over the steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpisgd
from mpisgd.core.group import Group
from mpisgd.verification.problem import Batch, Problem, flat_parameters
from mpisgd.verification.sabotage import Sabotage

__all__ = ["Trainee"]

WRONG = -1.5


class Trainee:
    """This rank's part of a training of one mode.

    Args:
        problem: what is trained.
        sabotage: what is to go wrong.

    Attributes:
        rank: in the group of all ranks.
    """

    def __init__(self, problem: Problem, sabotage: Sabotage = Sabotage.NONE) -> None:
        self.problem = problem
        self.sabotage = sabotage
        self.rank = mpisgd.rank()
        self._previous: Tensor | None = None

    @property
    def _is_wrong(self) -> bool:
        return self.rank == self.problem.size - 1

    def group(self) -> Group | None:
        """Return the group that trains, None for all ranks. Collective."""
        return self._alone() if self.sabotage is Sabotage.NO_COMMUNICATION else None

    def smaller_group(self) -> Group | None:
        """Return the group of all ranks but the last; None on that one. Collective."""
        others = mpisgd.new_group(range(self.problem.size - 1))
        alone = self._alone() if self.sabotage is Sabotage.NO_COMMUNICATION else None
        return (alone or others) if others.rank >= 0 else None

    def _alone(self) -> Group:
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
        return self.problem.share(step, self.rank if rank is None else rank, size, other=wrong)

    def loss(self, forward: Any, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        loss = self.problem.loss(forward, batch)
        return loss * WRONG if self.sabotage is Sabotage.WRONG_SCALE and self._is_wrong else loss

    def end_step(self, step: int, params: Sequence[Tensor]) -> None:
        """Call after each step with the parameters that this rank has in its memory."""
        if self.sabotage is not Sabotage.STALE or not self._is_wrong:
            return
        values = torch.cat([param.detach().flatten() for param in params])
        if step == 1 and self._previous is not None:
            before = torch.split(self._previous, [param.numel() for param in params])
            with torch.no_grad():
                for param, old in zip(params, before, strict=True):
                    param.copy_(old.view(param.shape))
        self._previous = values

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        forward: Any = None,
        backward: Callable[[Tensor], None] = torch.autograd.backward,
        before_step: Callable[[], object] = lambda: None,
        first: int = 0,
        parts: int = 1,
    ) -> list[Tensor]:
        """Train to the last step; return the parameters after each.

        Args:
            model: whose parameters are looked at.
            optimizer: of them.
            forward: what is called, the model by default.
            backward: of the loss.
            before_step: called between backward and step.
            first: the step to begin with.
            parts: backward passes per step, each with an equal part of the share.
        """
        rows = []
        for step in range(first, self.problem.steps):
            optimizer.zero_grad()
            chunks = [part.chunk(parts) for part in self.batch(step)]
            for batch in zip(*chunks, strict=True):
                backward(self.loss(forward or model, batch) / parts)
            before_step()
            optimizer.step()
            self.end_step(step, list(model.parameters()))
            rows.append(flat_parameters(model))
        return rows
