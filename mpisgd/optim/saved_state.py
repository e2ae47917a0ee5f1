"""`SavedState`: the state of a distributed optimizer is saved and loaded, whole or in parts of the ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.core.owner import Owner, owned_by
from mpisgd.core.uneven_data import refuse
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.method_state import ENTRY, own_of
from mpisgd.methods.strategy.state_keeper import StateKeeper
from mpisgd.methods.strategy.strategy import Synchronizer
from mpisgd.optim.broadcast import lay_out_state, undo_casts
from mpisgd.optim.loaded_parts import by_place, loads_as_torch, saves_as_torch, without_large
from mpisgd.sharding.needed_parts import NeededPart

__all__ = ["SavedState"]


class SavedState(torch.optim.Optimizer):
    """What `DistributedOptimizer` does with states; see there."""

    _synchronizer: Synchronizer
    _keeper: StateKeeper
    _window: AccumulationWindow
    _owner: Owner

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as the wrapped optimizer does.

        Collective if ranks share parameters or divide the state, since each rank has a part of it. If the
        strategy or the compressor keeps something from step to step, it is in the entry "mpisgd", including
        what belongs to this rank alone; other optimizers ignore that entry.
        """
        with owned_by(self._owner):
            return {**self._synchronizer.state_dict(super().state_dict), **self._keeper.entry()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as the wrapped optimizer does. The parameters stay as they are.

        All ranks load states of the same step: each its own, or all the same. State that belongs to one rank,
        such as a residual, is restored if the same rank of the same number of ranks loads it. Otherwise it is
        reset; state that also refers to other ranks is then reset on all. If this optimizer has another
        strategy or compressor than the saved one, what those had kept is ignored, with a warning.

        Raises:
            InvalidArgument: another version of mpisgd has written it in a form that this one does not know.
        """
        self._check_not_inside_join("load_state_dict")
        self._keeper.check(state_dict)
        self._synchronizer.end_failed_step()
        super().load_state_dict(state_dict)
        lay_out_state(self)
        self._keeper.load(state_dict)
        with owned_by(self._owner):
            self._synchronizer.loaded(state_dict)
        self._window.use(self._synchronizer.gradients)

    def _state_dict_at(self, root: int, group: Group) -> tuple[dict[str, Any], bool]:
        """Return `state_dict()` on the rank that saves it. Collective where that is.

        Args:
            root: the rank of `group` that saves it.
            group: the ranks that call this.

        Returns:
            The state, and whether ranks but the root lack what lies elsewhere; the same on all ranks.
        """
        if not self._synchronizer.gathers_state or group.ranks != self._group.ranks:
            return self.state_dict(), False
        if group.rank == root or not saves_as_torch(self):
            return self.state_dict(), True
        with owned_by(self._owner):
            state = self._synchronizer.contribute_state(super().state_dict)
        return {**state, **self._keeper.entry()}, True

    @property
    def method(self) -> str:
        """The name of the strategy in a saved state."""
        return self._synchronizer.method

    def method_entry(self) -> dict[str, Any]:
        """Return the entry "mpisgd" of `state_dict()`; {} if nothing is kept. Not collective."""
        return self._keeper.entry()

    def replica(self, *, anyway: bool = False) -> dict[str, Tensor]:
        """Return the parameters and buffers that differ by rank between steps, by key; not copied.

        Empty with `Synchronous` and the other strategies with one model for all ranks. They are not in
        `state_dict()`; `mpisgd.checkpoint` saves them beside it, for each rank.

        Args:
            anyway: also return them where they do not differ.
        """
        return self._synchronizer.replica() if anyway or self._synchronizer.replicas_differ else {}

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Any]
    ) -> dict[str, Tensor]:
        """Return the consensus of the replicas of all ranks: their mean, or what the strategy defines.

        Args:
            replicas: of all ranks.
            entries: of their `state_dict()`, "mpisgd".
        """
        return self._synchronizer.consensus_of(replicas, entries)

    def forget_own_state(self) -> None:
        """Reset the state that belongs to this rank alone; all ranks do so, as after a broadcast of the
        state.
        """
        self._keeper.forget_own()

    def _take_own(self, own: dict[str, Any]) -> None:
        """Take back what is this rank's own of the entry "mpisgd", and leave the rest. Not collective."""
        self._keeper.load({ENTRY: {**self.method_entry()[ENTRY], "own": own}})

    def shard_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a state that the ranks divide. Not collective; needs no further memory.

        For checkpoints in which each rank writes a file of its own. It has plain containers and tensors,
        which `torch.load(weights_only=True)` reads. Any number of ranks can load the parts by
        `load_shard_state_dicts`.

        Raises:
            InvalidArgument: every rank has the whole state.
        """
        with owned_by(self._owner):
            shard = self._synchronizer.shard_state_dict(super().state_dict)
        return {**shard, **self._keeper.entry()}

    def load_shard_state_dicts(self, shards: Sequence[Mapping[str, Any]]) -> None:
        """Load the parts of a state that the ranks of an earlier run had, however many ranks there were.

        Args:
            shards: what `shard_state_dict` has returned on all of these ranks, in any order. Each rank keeps
                what belongs to its own part; of tensors that are mapped from files it reads no more than
                that.

        Raises:
            InvalidArgument: every rank has the whole state; or a part is missing.
        """
        if not shards:
            raise InvalidArgument("load_shard_state_dicts: no shards; pass those of all ranks of a run")
        entries = [shard[ENTRY] for shard in shards if ENTRY in shard]
        mine = [entry for entry in entries if own_of(entry, self._group.rank, self._group.size) is not None]
        kept = {ENTRY: (mine or entries)[0]} if entries else {}
        self._keeper.check(kept)
        self._load_shards(shards)
        self._keeper.load(kept)

    def _load_shards(self, shards: Sequence[Mapping[str, Any]], *, held: bool = False) -> None:
        """Do so with all of them, or with those that this rank holds; collective then."""
        with owned_by(self._owner):
            self._synchronizer.load_shards(shards, super().load_state_dict, held=held)
        self._window.use(self._synchronizer.gradients)

    def _needed_parts(self, group: Group) -> Mapping[int, NeededPart] | None:
        """Return the parts of a loaded state that this rank needs, by the places of parameters; None: all.

        Args:
            group: the ranks that load it.
        """
        if group.ranks != self._group.ranks or not loads_as_torch(self):
            return None
        return self._synchronizer.needed_parts()

    def _load_parts(self, state_dict: dict[str, Any], needed: Mapping[int, NeededPart]) -> None:
        """Load a state as `load_state_dict` does, of which this rank has what it needs. Not collective."""
        self._check_not_inside_join("load_state_dict")
        self._keeper.check(state_dict)
        self._synchronizer.end_failed_step()
        small = without_large(state_dict)
        super().load_state_dict(small)
        undo_casts(self, small["state"])
        params = [param for group in self.param_groups for param in group["params"]]
        for place, entries in by_place(state_dict):
            loaded = self.state[params[place]]
            if needed[place].runs:
                self.state[params[place]] = {key: loaded.get(key, value) for key, value in entries.items()}
        self._keeper.load(state_dict)
        with owned_by(self._owner):
            self._synchronizer.load_parts()
        self._window.use(self._synchronizer.gradients)

    @property
    def _group(self) -> Group:
        return self._synchronizer.training.group

    def _check_not_inside_join(self, name: str) -> None:
        if self._window.uneven is not None:
            refuse(
                f"{name}()", "ranks that have no more data do not come to it; call it after the `with` block"
            )
