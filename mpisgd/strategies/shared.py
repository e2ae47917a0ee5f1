"""`Shared`: a host has one copy of the parameters, of which each of its ranks updates its own ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.sharding.grad_norm import clip_grad_norm_
from mpisgd.sharding.shared_parameters import SharedParameters
from mpisgd.sharding.shared_state import gather_states
from mpisgd.strategies.replicated import Replicated
from mpisgd.strategies.strategy import Training

__all__ = ["Shared"]


class _OwnedGradients(GradientReducer):
    """Reduces gradients, and leaves those of a parameter with the rank of this host that updates it."""

    def __init__(self, training: Training, shared: SharedParameters) -> None:
        super().__init__(training.named, training.group, training.options)
        self._shared = shared

    def _owners(self) -> Sequence[int] | None:
        """Return the rank that needs each gradient, where it can be brought to one rank alone."""
        compressed = any(self.options.compression.changes(param.dtype) for param in self.params)
        return self._shared.owners if self.group.shm is not None and not compressed else None

    def _unload(self, in_flight: InFlightReduction) -> list[int] | None:
        nonfinite = super()._unload(in_flight)
        self._shared.leave_gradients_with_owners()
        return nonfinite

    def would_reduce_twice(self, num_added: Mapping[int, int] | None) -> bool:
        """Return whether reduced gradients are with the ranks that own them, and were not reset since."""
        are_with_owners = self._shared.gradients_are_with_owners(self.holds_reduced)
        return are_with_owners or super().would_reduce_twice(num_added)


class Shared(Replicated):
    """Lets the wrapped optimizer see and update this rank's parameters, nothing else.

    Between steps the optimizer has all parameters in its groups, as programs expect; during one it has this
    rank's only, so it updates these and has state for these. A state that is loaded is whole until the next
    step, which drops what belongs to others.
    """

    def __init__(self, training: Training) -> None:
        self._parameters = SharedParameters(training.named, training.group)
        self._hidden: list[list[Tensor]] | None = None
        super().__init__(training)

    def _make_reducer(self) -> GradientReducer:
        return _OwnedGradients(self.training, self._parameters)

    # -- a step -------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Wait until nobody reads the parameters, and show the optimizer this rank's only. Collective."""
        self._show_all()  # a step that raised has left them hidden
        self._parameters.check_in_place()
        self._parameters.barrier("about to be updated")
        self._drop_states()
        groups = self.training.optimizer.param_groups
        self._hidden = [group["params"] for group in groups]
        for group in groups:
            group["params"] = self._parameters.own_of(group["params"])

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Let all ranks finish their updates before the closure reads the parameters."""

        def when_all_are_updated() -> Any:
            self._parameters.barrier("updated")
            try:
                return closure()
            except BaseException:
                self._show_all()  # the step ends here
                raise

        return when_all_are_updated

    def after_step(self, num_steps: int) -> None:
        """Show the optimizer all parameters again, and wait until all are updated. Collective."""
        self._show_all()
        self._parameters.barrier("updated")

    def _show_all(self) -> None:
        """Give the optimizer all its parameters back, if they are hidden."""
        hidden, self._hidden = self._hidden, None
        groups = self.training.optimizer.param_groups
        for group, params in zip(groups, hidden or (), strict=hidden is not None):
            group["params"] = params

    def before_zero_grad(self) -> None:
        """Forget the gradients that are with other ranks."""
        self._parameters.drop_absent_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm of all gradients, of which each rank has its own. Collective."""
        params, group = self.training.params, self.training.group
        return clip_grad_norm_(params, self._parameters, group, max_norm, norm_type, error_if_nonfinite)

    # -- the state ----------------------------------------------------------------------------------

    def _drop_states(self) -> None:
        if self.has_whole_state and self._parameters.divided:
            self.has_whole_state = False
            for param in self.training.params:
                if not self._parameters.owns(param):
                    self.training.optimizer.state.pop(param, None)

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parameters, of which each rank has its own. Collective.

        One that was loaded here counts, although it may not have been loaded where its owners are.
        """
        self._show_all()
        params, state = self.training.params, self.training.optimizer.state
        mine = {i: state[p] for i, p in enumerate(params) if self._parameters.owns(p) and p in state}
        everyones = gather_states(mine, self.training.group)
        if self.has_whole_state:
            return super().state_dict(make)
        own = dict(state)
        for index in sorted(everyones):  # in the same order on every rank
            state.pop(params[index], None)
            state[params[index]] = everyones[index]
        try:
            return super().state_dict(make)
        finally:
            state.clear()
            state.update(own)

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note that the optimizer has the state of all parameters."""
        super().loaded(state_dict)
        self.has_whole_state = True

    # -- other parameters, other ranks --------------------------------------------------------------

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Share further parameters, too."""
        super().extend(named)
        self._parameters.extend(named)

    def move_to(self, group: Group) -> None:
        """Share the parameters, as they are now, with other ranks. Collective over `group`.

        Raises:
            InvalidArgument: ranks have the state of their own parameters only, and these change. On all of
                them, if all have agreed on `has_whole_state`.
        """
        if not self.has_whole_state:
            raise InvalidArgument(
                "DistributedOptimizer: the ranks change, and with share_parameters=True each has the state "
                "of its own parameters only; call load_state_dict() with that of all of them before"
            )
        self._show_all()
        for _, param in self.training.named:
            param.data = param.detach().clone()  # others may still read, or take with them, what was shared
        self._parameters = SharedParameters(self.training.named, group)
        super().move_to(group)
