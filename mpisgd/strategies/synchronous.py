"""`Synchronous`: one model on all ranks, which average their gradients in every step.

N ranks compute what one process computes on the joined batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.sharding.grad_norm import clip_grad_norm_
from mpisgd.sharding.optimizer_shard import OptimizerShard, check_shardable_optimizer
from mpisgd.sharding.owned_gradients import OwnedGradients
from mpisgd.sharding.shared_parameters import check_shareable
from mpisgd.strategies.strategy import Strategy, Synchronizer, Training

__all__ = ["Synchronous"]

COMPRESSION = "compression"  # the entry of a state_dict


@dataclass(frozen=True)
class Synchronous(Strategy):
    """All ranks have the same parameters and apply the same gradients in every step. The default."""

    def check(self, training: Training) -> None:
        """Raise where the parameters cannot be shared, if they are to be."""
        if training.share_parameters:
            check_shardable_optimizer(training.optimizer)
            check_shareable(training.named)

    def synchronizer(self, training: Training) -> Synchronizer:
        """Return what reduces gradients; with shared parameters, to the ranks that own them."""
        return (_Shared if training.share_parameters else _Replicated)(training)


class _Replicated(Synchronizer):
    """Every rank has all parameters and updates all of them."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._reducer = self._make_reducer()
        self.gradients = self._reducer

    def _make_reducer(self) -> GradientReducer:
        return GradientReducer(self.training.named, self.training.group, self.training.options)

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state, and what compressors keep of this rank's gradients."""
        kept = self._reducer.compression_state.state_dict()
        return {**make(), COMPRESSION: kept} if kept else make()

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Give compressors back what they had kept."""
        self._reducer.compression_state.load_state_dict(state_dict.get(COMPRESSION, {}))

    def move_to(self, group: Group) -> None:
        """Go on with other ranks; what compressors kept of the gradients is dropped."""
        super().move_to(group)
        self._reducer = self._make_reducer()
        self.gradients = self._reducer


class _Shared(_Replicated):
    """A host has one copy of the parameters, of which each of its ranks updates its own ones."""

    def __init__(self, training: Training) -> None:
        self._shard = OptimizerShard(training.optimizer, training.named, training.group)
        super().__init__(training)

    def _make_reducer(self) -> GradientReducer:
        training = self.training
        return OwnedGradients(training.named, training.group, training.options, self._shard.parameters)

    def before_step(self) -> None:
        """Show the optimizer this rank's parameters only."""
        self._shard.begin_update()

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Let all ranks finish their updates before the closure reads the parameters."""
        return self._shard.around(closure)

    def after_step(self, num_steps: int) -> None:
        """Show the optimizer all parameters again, once all ranks have updated theirs."""
        self._shard.end_update()

    def before_zero_grad(self) -> None:
        """Forget the gradients that are with other ranks."""
        self._shard.parameters.drop_absent_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm of all gradients, of which each rank has its own. Collective."""
        optimizer, group = self.training.optimizer, self.training.group
        params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        shared = self._shard.parameters
        return clip_grad_norm_(params, shared, group, max_norm, norm_type, error_if_nonfinite)

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parameters, of which each rank has its own. Collective."""
        return super().state_dict(lambda: self._shard.with_all_states(make))

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note that the optimizer has the state of all parameters."""
        super().loaded(state_dict)
        self._shard.loaded_state()

    @property
    def has_whole_state(self) -> bool:
        """Whether this rank has the optimizer state of all parameters."""
        return self._shard.has_whole_state

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Share further parameters, too."""
        super().extend(named)
        self._shard.extend(named)

    def move_to(self, group: Group) -> None:
        """Share the parameters with other ranks; see `OptimizerShard.move_to`."""
        self._shard.move_to(self.training.named, group)
        super().move_to(group)
