"""`OptimizerShard`: lets the wrapped optimizer see and update this rank's parameters, nothing else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.sharding.shared_parameters import Named, SharedParameters
from mpisgd.sharding.shared_state import gather_states

__all__ = ["OptimizerShard", "check_shardable_optimizer"]


class OptimizerShard:
    """What a rank does of an optimizer's work.

    Between steps the optimizer has all parameters in its groups, as programs expect; during one it has this
    rank's only, so it updates these and has state for these. A state that is loaded is whole until the next
    step, which drops what belongs to others.

    Args:
        optimizer: the one.
        named: all its parameters, with names.
        group: the ranks that train together.

    Attributes:
        parameters: where they lie and which rank owns each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named, group: Group) -> None:
        self.parameters = SharedParameters(named, group)
        self._optimizer = optimizer
        self._group = group
        self._hidden: list[list[Tensor]] | None = None
        self._known: dict[int, tuple[list[int], list[Tensor]]] = {}
        self._whole = True

    def extend(self, named: Named) -> None:
        """Take over a list of parameters that has grown at its end. Collective."""
        self.parameters.extend(named)

    def move_to(self, named: Named, group: Group) -> None:
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
        self.show_all()
        self._known.clear()
        self._group = group
        for _, param in named:
            param.data = param.detach().clone()  # others may still read, or take with them, what was shared
        self.parameters = SharedParameters(named, group)

    # -- a step -------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Wait until nobody reads the parameters, and show the optimizer this rank's only. Collective."""
        self.show_all()  # a step that raised has left them hidden
        self.parameters.check_in_place()
        self.parameters.barrier_before_update()
        self._drop_states()
        groups = self._optimizer.param_groups
        self._hidden = [group["params"] for group in groups]
        for place, group in enumerate(groups):
            group["params"] = self._own_of(place, group["params"])

    def _own_of(self, place: int, params: list[Tensor]) -> list[Tensor]:
        """Return this rank's of the parameters of a group; looked for once, there may be hundreds."""
        ids = [id(param) for param in params]
        known, own = self._known.get(place, ([], []))
        if known != ids:
            own = list(filter(self.parameters.owns, params))
            self._known[place] = (ids, own)
        return list(own)

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as it must be called within a step, which may have changed parameters before."""

        def when_all_are_updated() -> Any:
            self.parameters.barrier_after_update()
            try:
                return closure()
            except BaseException:
                self.show_all()  # the step ends here
                raise

        return when_all_are_updated

    def end_update(self) -> None:
        """Show all parameters again, and wait until all are updated. Collective."""
        self.show_all()
        self.parameters.barrier_after_update()

    def show_all(self) -> None:
        """Give the optimizer all its parameters back, if they are hidden."""
        hidden, self._hidden = self._hidden, None
        for group, params in zip(self._optimizer.param_groups, hidden or (), strict=hidden is not None):
            group["params"] = params

    # -- its state ----------------------------------------------------------------------------------

    @property
    def has_whole_state(self) -> bool:
        """Whether this rank has the state of all parameters."""
        return self._whole

    def loaded_state(self) -> None:
        """Note that the optimizer has the state of all parameters."""
        self._whole = True

    def _drop_states(self) -> None:
        if self._whole and self.parameters.divided:
            self._whole = False
            for param in self._params():
                if not self.parameters.owns(param):
                    self._optimizer.state.pop(param, None)

    def with_all_states(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `make` makes of the optimizer while it has the states of all parameters. Collective.

        One that was loaded here counts, although it may not have been loaded where its owners are.
        """
        self.show_all()
        params, state = self._params(), self._optimizer.state
        mine = {i: state[p] for i, p in enumerate(params) if self.parameters.owns(p) and p in state}
        everyones = gather_states(mine, self._group)
        if self._whole:
            return make()
        own = dict(state)
        for index in sorted(everyones):  # in the same order on every rank
            state.pop(params[index], None)
            state[params[index]] = everyones[index]
        try:
            return make()
        finally:
            state.clear()
            state.update(own)

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]


def check_shardable_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless an optimizer can be applied to some of its parameters at a time.

    Raises:
        InvalidArgument: it needs all of them together.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "share_parameters: LBFGS computes its direction from all gradients together, and with shared "
            "parameters each rank has those of its own only"
        )
