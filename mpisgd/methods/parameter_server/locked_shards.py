"""`LockedShards`: workers push gradients into shards, one at a time, and the wrapped optimizer updates them.

Downpour SGD (Dean et al. 2012, algorithm 1); x: the parameters on the servers, w: those of a worker, a: the
learning rate. With n workers and op=AVG each gradient counts 1/n.

    g <- gradient at w
    accrued <- accrued + g
    every push_every steps:  x <- the wrapped optimizer's step on x with `accrued`;  accrued <- 0
    every pull_every steps:  w <- x
    otherwise:               w <- w - a g

The server is memory with a lock: the worker that pushes runs the optimizer on the shard, whose state lies
beside the parameters. On one host there is no server process, and nothing waits where nothing is pushed.
Between hosts the shard and its state travel to the worker and back.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.event_log import Entry, Place, grads_of
from mpisgd.gradients.fusion_buffer import laid_out, layout_of
from mpisgd.methods.parameter_server.layout import PARAMETER, lay_out_shards
from mpisgd.methods.parameter_server.shard_memory import ShardMemory, Version
from mpisgd.methods.parameter_server.stand_ins import schemas_of, standing_in
from mpisgd.methods.parameter_server.worker import Worker
from mpisgd.methods.strategy.divided_state import DividedState
from mpisgd.methods.strategy.hidden_parameters import HiddenParameters
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.elementwise import single_step
from mpisgd.sharding.needed_parts import LoadedPart, NeededPart

__all__ = ["LockedShards"]


class LockedShards(Worker):
    """Pushes to and pulls from shards in a `Window`; between steps the optimizer has no state.

    Args:
        training: what it works on.
        staleness: see `Worker`.
        servers: see `Worker`; all ranks hold shards where there are none.
        push_every: see above.
        pull_every: see above.

    Attributes:
        has_state_in_shards: whether the state that counts is there. That of the optimizer counts where it is
            not: before the first step, and after a load of all of it.
    """

    gathers_state = True
    has_state_in_shards = False

    def __init__(
        self,
        training: Training,
        staleness: int | None,
        servers: tuple[int, ...],
        push_every: int,
        pull_every: int,
    ) -> None:
        self._push_every, self._pull_every = push_every, pull_every
        self._hidden = HiddenParameters(training.optimizer)
        self._runs_closure = False
        self._accrued: dict[int, Tensor] = {}
        self._num_steps = 0
        super().__init__(training, staleness, servers)

    def open(self) -> None:
        """See `Worker`."""
        super().open()
        group, optimizer = self.training.group, self.training.optimizer
        self._is_on_one_host = group.shared_memory is not None or group.size == 1
        self._group_of = [
            place for place, options in enumerate(optimizer.param_groups) for _ in options["params"]
        ]
        schemas = schemas_of(optimizer, [param for _, param in self.training.named])
        owners = self._servers or group.ranks
        layouts = [layout for layout in lay_out_shards(schemas, len(owners), group.size) if layout.entries]
        group.queue.run(Operation("ParameterServer", extra=f"shards={layouts}"), lambda: None)
        self._memory = ShardMemory(layouts, owners[: len(layouts)], group)

    # -- a step ------------------------------------------------------------------------------------

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Push what the closure computes."""
        self._runs_closure = True

        def then_push() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._step()
            return loss

        return then_push

    def before_step(self) -> None:
        """Do all that a step does; the optimizer finds nothing left to do."""
        runs_closure, self._runs_closure = self._runs_closure, False
        self._show()  # a step that raised has left them hidden
        self._hidden.check(self.training.optimizer)
        self._scaling.before_step(self.training.optimizer)
        if not runs_closure:
            self._step()
        self._hidden.hide(self.training.optimizer)

    def after_step(self, num_steps: int) -> None:
        """Show the optimizer its parameters again."""
        self._show()
        self._scaling.after_step()

    def end_failed_step(self) -> None:
        """Show the optimizer its parameters, which are hidden in a step."""
        self._show()

    def _show(self) -> None:
        self._hidden.show(self.training.optimizer)

    @torch.no_grad()
    def _step(self) -> None:
        self._begin_update()
        if self.events is not None:
            self.events.add(Entry("step", (self.training.group.rank,), grads_of(self.training.named)))
        grads = {i: p.grad for i, (_, p) in enumerate(self.training.named) if p.grad is not None}
        if self.scale != 1.0:
            grads = {i: grad * self.scale for i, grad in grads.items()}
        self._num_steps += 1
        for i, grad in grads.items() if self._push_every > 1 else ():
            self._accrued[i] = self._accrued[i] + grad if i in self._accrued else grad.clone()
        if self._push_every == 1:
            self._push(grads)
        elif self._num_steps % self._push_every == 0:
            self._push_accrued()
        self._end_update()
        if self._num_steps % self._pull_every == 0:
            self.pull()
        else:
            self._move_locally(grads)
        self._go_on()

    def finish(self) -> None:
        """See `Worker.finish`; pushes before what a period that is not over has accrued."""
        self._publish_once()
        if self._accrued:
            self._push_accrued()
        super().finish()

    @torch.no_grad()
    def _push_accrued(self) -> None:
        accrued, self._accrued = self._accrued, {}
        self._push(accrued)

    def _push(self, grads: dict[int, Tensor]) -> None:
        """Update every shard, this rank's own first: so that workers that come together do not queue."""
        self._count_push(complete=False)
        count = len(self._memory.layouts)
        for place in range(count):
            shard = (self.training.group.rank + place) % count
            version = self._memory.checkout(shard)
            try:
                self._update(version, grads)
                version.counts[self.training.group.rank] += 1
            except BaseException:
                self._memory.give_up(shard)
                raise
            self._memory.commit(shard)
            self._record("push", shard, 2 * version.number)
        self._count_push(complete=True)

    def _record(self, what: str, shard: int, number: int) -> None:
        if self.events is not None:
            places = [entry.param for entry in self._memory.layouts[shard].entries if entry.key == PARAMETER]
            names = tuple(self.training.named[place][0] for place in places)
            place = Place(f"shard {shard}", number)
            self.events.add(Entry(what, (self.training.group.rank,), names=names, place=place))

    def _update(self, version: Version, grads: dict[int, Tensor]) -> None:
        """Run the wrapped optimizer on the parameters of a version."""
        optimizer, named = self.training.optimizer, self.training.named
        existing = version.existing()
        leaves = {
            i: torch.nn.Parameter(tensor, requires_grad=named[i][1].requires_grad)
            for (i, key), tensor in version.tensors.items()
            if key == PARAMETER and i in grads
        }
        state: defaultdict[Any, Any] = defaultdict(dict)
        for (i, key), tensor in existing.items():
            if i in leaves and key != PARAMETER:
                state[leaves[i]][key] = tensor
        for i, leaf in leaves.items():
            leaf.grad = laid_out(grads[i], leaf)  # which lies in the order of its elements
        with standing_in(optimizer, self._by_group(leaves), state):
            single_step(optimizer)(optimizer)
        for place, ((i, key), slot) in enumerate(version.tensors.items()):
            value = state[leaves[i]].get(key) if i in leaves and key != PARAMETER else None
            if value is not None:
                version.flags[place] = 1
                if value.data_ptr() != slot.data_ptr():
                    slot.copy_(value)

    def _by_group(self, leaves: dict[int, Any]) -> list[list[Any]]:
        groups: list[list[Any]] = [[] for _ in self.training.optimizer.param_groups]
        for i, leaf in leaves.items():
            groups[self._group_of[i]].append(leaf)
        return groups

    def _move_locally(self, grads: dict[int, Tensor]) -> None:
        options = self.training.optimizer.param_groups
        for i, grad in grads.items():
            self.training.named[i][1].add_(grad, alpha=-float(options[self._group_of[i]]["lr"]))

    # -- parameters and state ----------------------------------------------------------------------

    @torch.no_grad()
    def pull(self) -> None:
        """Read the parameters as they are now, each shard as a whole."""
        self._publish_once()
        for shard in range(len(self._memory.layouts)):
            version = self._memory.read(shard)
            for (i, key), tensor in version.tensors.items():
                if key == PARAMETER:
                    self.training.named[i][1].copy_(tensor)
            self._record("fetch", shard, 2 * version.number + 1)

    @torch.no_grad()
    def _publish(self) -> None:
        for shard in range(len(self._memory.layouts)):
            self._write(shard, parameters=True, state=not self.has_state_in_shards)

    def _write(self, shard: int, *, parameters: bool, state: bool) -> None:
        """Make this rank's parameters, or what the optimizer has of their state, those of a shard."""
        version = self._memory.checkout(shard)
        try:
            for place, ((i, key), slot) in enumerate(version.tensors.items()):
                if parameters if key == PARAMETER else state:
                    param = self.training.named[i][1]
                    value = param if key == PARAMETER else self._state_of(param).get(key)
                    version.flags[place] = value is not None
                    if value is not None:
                        slot.copy_(value)
        except BaseException:
            self._memory.give_up(shard)
            raise
        self._memory.commit(shard)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter, also where that was loaded in parts."""
        state = self.training.optimizer.state.get(param, {})
        return {
            key: value.whole() if isinstance(value, LoadedPart) else value for key, value in state.items()
        }

    def _publish_once(self) -> None:
        was_fresh = self.is_fresh
        super()._publish_once()
        if was_fresh:
            self._leave_state_to_shards()
            self._accrued, self._num_steps = {}, 0  # of what was before a load nothing counts

    def _leave_state_to_shards(self) -> None:
        self.has_state_in_shards = True
        self.training.optimizer.state = DividedState()

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """See `Synchronizer`."""
        super().loaded(state_dict)
        self.has_state_in_shards = False

    def needed_parts(self) -> dict[int, NeededPart]:
        """Return what this rank needs of a loaded state: all of the parameters of its shard, by place."""
        mine = {entry.param for shard in self._own_shards for entry in self._memory.layouts[shard].entries}
        return {
            i: NeededPart(layout_of(param), ((0, param.numel()),) if i in mine else ())
            for i, (_, param) in enumerate(self.training.named)
        }

    @torch.no_grad()
    def load_parts(self) -> None:
        """Write the state that was loaded to this rank's shard, where the others find it. Not collective.

        The parameters follow when the first rank gives everybody its own.
        """
        self._show()
        self.is_fresh = True
        for shard in self._own_shards:
            self._write(shard, parameters=False, state=True)
        self._leave_state_to_shards()

    @property
    def _own_shards(self) -> list[int]:
        me = self.training.group.ranks[self.training.group.rank]
        return [shard for shard, owner in enumerate(self._memory.owners) if owner == me]

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state as it is in the shards now, where the wrapped optimizer's is. Not collective."""
        self._show()
        if not self.has_state_in_shards:
            return make()
        optimizer = self.training.optimizer
        try:
            self._read_state()
            return make()
        finally:
            optimizer.state = DividedState()

    def contribute_state(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Synchronizer`; who saves the state reads the shards without the others."""
        self._show()
        return super().contribute_state(make)

    def _read_state(self) -> None:
        """Give the optimizer copies of the state in the shards."""
        state: defaultdict[Any, Any] = defaultdict(dict)
        for shard in range(len(self._memory.layouts)):
            for (i, key), tensor in self._memory.read(shard).existing().items():
                if key != PARAMETER:
                    state[self.training.named[i][1]][key] = tensor.clone()
        self.training.optimizer.state = state

    def _applied(self) -> list[list[int]]:
        return [self._memory.read(shard).counts.tolist() for shard in range(len(self._memory.layouts))]

    @property
    def has_whole_state(self) -> bool:  # type: ignore[override]  # what others say once
        """Whether this rank can read the state of all parameters, also when ranks are lost."""
        return self._is_on_one_host or not self.has_state_in_shards

    def close(self) -> None:
        """See `Synchronizer`."""
        self.bring_home()

    @torch.no_grad()
    def bring_home(self) -> None:
        """Read parameters and state from the shards, to begin anew with them."""
        self._show()
        if not self.is_fresh:
            self.pull()
        if self.has_state_in_shards:
            self._read_state()
            self.has_state_in_shards = False

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `Worker`. All ranks are there, other than after a loss: so all that they accrued counts."""
        if self._accrued and not self.is_fresh:
            self._push_accrued()
        # What the first rank brings home counts.
        self.training.group.queue.run(Operation("ParameterServer", extra="all has been pushed"), lambda: None)
        super().extend(named)
