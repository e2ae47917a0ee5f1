"""`StreamedSynchronizer`: parameters, gradients and optimizer state in files, updated chunk by chunk."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.methods.sharded.optimizer_state import OptimizerState
from mpisgd.methods.strategy.hidden_parameters import HiddenParameters
from mpisgd.methods.strategy.strategy import Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.grad_norm import clip_factor
from mpisgd.sharding.layerwise.streamed_parameters import StreamedParameters
from mpisgd.sharding.layerwise.streamed_pieces import StreamedPieces
from mpisgd.sharding.needed_parts import NeededPart
from mpisgd.sharding.offload.error_agreement import raised_on_every_rank
from mpisgd.sharding.piece_update import PieceUpdate

__all__ = ["StreamedSynchronizer"]


class _Gradients(GradientSync):
    """Leaves the gradients to the hooks of the layers."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def combine_loss(self, loss: Tensor) -> Tensor:
        """Return the mean of the ranks' losses."""
        total = loss.clone()
        all_reduce(total, ReduceOp.AVG, self._group)
        return total


class StreamedSynchronizer(Synchronizer):
    """The working part of `Sharded` for parameters that `offload_parameters` has moved to files.

    Backward has brought the gradients there. A step reads them, and forgets them.

    Args:
        training: what it works on.
        streamed: the parameters.
    """

    gathers_state = True

    def __init__(self, training: Training, streamed: StreamedParameters) -> None:
        super().__init__(training)
        self._streamed = streamed
        self.gradients = _Gradients(training.group)
        self._runs_closure = False
        self._pieces = StreamedPieces(training.named, training.optimizer.param_groups, streamed)
        hidden = HiddenParameters(training.optimizer)
        self._optimizer_state = OptimizerState(training, self._pieces, streamed.offload, hidden)

    # -- a step --------------------------------------------------------------------------------------

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Update what the closure has computed gradients of."""
        self._runs_closure = True

        def then_update() -> Any:
            loss = closure()
            self._update()
            return loss

        return then_update

    def before_step(self) -> None:
        """Update the parameters; the wrapped optimizer finds nothing left to do. Collective."""
        runs_closure, self._runs_closure = self._runs_closure, False
        self.end_failed_step()
        self._optimizer_state.take_over()
        if not runs_closure:
            self._update()

    def after_step(self, num_steps: int) -> None:
        """Show the optimizer its parameters again."""
        self._optimizer_state.show()
        self._streamed.reset_gradients()

    def end_failed_step(self) -> None:
        """Show the optimizer its parameters, which are hidden in a step."""
        self._optimizer_state.show()

    def before_zero_grad(self) -> None:
        """Forget the gradients in the files."""
        self._streamed.reset_gradients()

    def _update(self) -> None:
        self._optimizer_state.hide()
        store = self._optimizer_state.store
        self._streamed.release_all()  # such as an exception in a hook of `state_dict` has left in memory
        with store.shared_errors(self.training.group):
            update = PieceUpdate(self.training.optimizer, store)
            self._pieces.hand_over(update)
            update.raise_error()
            store.end_step()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm of all gradients, which are read, and written if they change. Collective."""
        group = self.training.group
        norms: list[Tensor] = []
        with raised_on_every_rank(group):
            self._pieces.each_gradient(
                lambda grad: norms.append(torch.linalg.vector_norm(grad, norm_type)), changes=False
            )
        total, factor = clip_factor(norms, range(group.size), group, max_norm, norm_type, error_if_nonfinite)
        if factor < 1:
            with raised_on_every_rank(group):
                self._pieces.each_gradient(lambda grad: grad.mul_(factor), changes=True)
        return total

    # -- the wrapped optimizer's state, which lies in files: to be divided is this method's work ---------

    @property
    def has_whole_state(self) -> bool:  # type: ignore[override]  # what others say once
        """See `Synchronizer`."""
        return self._optimizer_state.is_whole

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parameters, of which each rank has its pieces. Collective."""
        self._optimizer_state.show()
        return self._optimizer_state.state_dict(make)

    def contribute_state(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Synchronizer`."""
        self._optimizer_state.show()
        return self._optimizer_state.state_dict(make, is_wanted=False)

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note that the optimizer has the state of all parameters."""
        self._optimizer_state.loaded()

    def needed_parts(self) -> Mapping[int, NeededPart] | None:
        """See `Synchronizer`."""
        return self._optimizer_state.needed_parts()

    def load_parts(self) -> None:
        """See `Synchronizer`."""
        self._optimizer_state.load_parts()

    def shard_state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank's pieces, and the options of all groups."""
        self._optimizer_state.show()
        return self._optimizer_state.to_shard(make)

    def load_shards(
        self,
        shards: Sequence[Mapping[str, Any]],
        load: Callable[[dict[str, Any]], Any],
        *,
        held: bool = False,
    ) -> None:
        """Take this rank's part of what the ranks of a run had."""
        assert not held, "commits have no shards of files"
        self._optimizer_state.show()
        self._optimizer_state.load_shards(shards, load)

    # -- what files cannot follow --------------------------------------------------------------------

    def consensus(self) -> Sequence[Tensor]:
        """Refuse: the parameters are not in memory."""
        raise InvalidArgument("consensus: the parameters are in files; use model.state_dict()")

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Refuse: the pieces are those of the parameters that were moved to files."""
        raise InvalidArgument("add_param_group: the parameters are in files, and no more can be added")

    @property
    def why_fixed(self) -> str:
        """See `Synchronizer`: the parts that other ranks had are lost."""
        return "the parameters are in files, of which each rank has its part only"
