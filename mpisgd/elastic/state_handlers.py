"""How a `State` saves, restores and synchronizes its values: one handler for each, chosen by its type."""

from collections.abc import Mapping
from typing import Any

import torch

from mpisgd.accelerator.host_copy import copy_tree
from mpisgd.arguments import has_state_dict
from mpisgd.collectives.objects import broadcast_object
from mpisgd.elastic.buddy_replicas import HeldByOne, PerRank
from mpisgd.elastic.sampler import ElasticSampler
from mpisgd.method_state import ENTRY, HasOwnState
from mpisgd.methods.compressed_momentum.compressed_momentum import CompressedMomentumOptimizer
from mpisgd.optim.broadcast import broadcast_optimizer_state, broadcast_parameters, undo_casts
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.optim.own_state import copy_into_replica, merge_own, split_own

__all__ = ["StateHandler", "handler_for"]


class StateHandler:
    """Saves, restores and synchronizes one value of a state.

    This one is for anything that can be copied and pickled: numbers, lists, tensors.

    Attributes:
        value: what the state's attribute is.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def per_rank(self) -> PerRank | None:
        """What of it differs between ranks, and survives the loss of one of them."""
        return self.value if isinstance(self.value, PerRank) else None

    def save(self, into: Any) -> Any:
        """Return a copy of the value, in the memory of an older copy where that fits."""
        return copy_tree(self.value, into)

    def restore(self, saved: Any) -> None:
        """Restore the value to what it was when `saved` was made; `saved` may be used again."""
        self.value = copy_tree(saved)

    def reset(self) -> None:
        """Adapt the value to the present number of ranks, if it depends on it."""

    def end_reset(self) -> None:
        """Do what waits for the program's reset callbacks, which make its groups again. Collective."""

    def sync(self) -> None:
        """Broadcast the value of rank 0. Collective."""
        self.value = broadcast_object(self.value)

    def keep_own(self) -> Any:
        """Return a copy of what is this rank's own, for `return_own` after a `sync`; None: nothing."""
        return None

    def return_own(self, kept: Any) -> None:
        """Take back what `keep_own` has returned."""


class _StateDictHandler(StateHandler):
    """For objects with `state_dict()` and `load_state_dict()`: schedulers, scalers, metrics."""

    def save(self, into: Any) -> Any:
        return copy_tree(self.value.state_dict(), into)

    def restore(self, saved: Any) -> None:
        self.value.load_state_dict(copy_tree(saved))  # what is loaded may become part of the value

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class _SamplerHandler(_StateDictHandler):
    def reset(self) -> None:
        self.value.reset()


class _ModuleHandler(_StateDictHandler):
    def restore(self, saved: Any) -> None:
        self.value.load_state_dict(saved)  # copies

    def sync(self) -> None:
        broadcast_parameters(self.value)


class _OptimizerHandler(_StateDictHandler):
    def restore(self, saved: Any) -> None:
        own = copy_tree(saved)
        self.value.load_state_dict(own)
        undo_casts(self.value, own.get("state", {}))

    def reset(self) -> None:
        communicates = isinstance(self.value, DistributedOptimizer | CompressedMomentumOptimizer)
        if communicates and self.value.spans_job:
            self.value.rebuild()  # one with a group of its own waits for a callback to give it a new one
        if not isinstance(self.value, DistributedOptimizer):  # which does so itself
            self.value.zero_grad()  # of what was going on when a rank was lost

    def sync(self) -> None:
        broadcast_optimizer_state(self.value)

    def keep_own(self) -> Any:
        value = self.value
        entry = value.method_entry().get(ENTRY) if isinstance(value, HasOwnState) else None
        if entry is None or not (entry["own"] or value.replica()):
            return None
        if not value.replica():  # not even asked for the state: of some that is collective
            return copy_tree({"own": entry["own"]})
        _, mine = split_own(value, self.value.state_dict())
        return copy_tree(mine)

    def return_own(self, kept: Any) -> None:
        if kept is not None and isinstance(self.value, DistributedOptimizer) and "state" not in kept:
            self.value._take_own(kept["own"])
        elif kept is not None:
            state = self.value.state_dict()
            entry = state[ENTRY]
            self.value.load_state_dict(merge_own(state, kept, entry["rank"], entry["size"]))
            undo_casts(self.value, kept.get("state", {}))
            copy_into_replica(self.value, kept.get("replica", {}))


class _ShardsHandler(_OptimizerHandler):
    """For optimizers of whose state each rank has a part: it keeps that, and its buddy a replica.

    Where the ranks have changed, each gets of all parts what it owns now. A group of its own is made again
    later, by the program: all of its ranks, whichever these are, get all parts.
    """

    def __init__(self, value: DistributedOptimizer) -> None:
        super().__init__(value)
        self._shards: list[Any] = []  # which a group of its own is to divide anew, that is not there yet

    @property
    def per_rank(self) -> PerRank:
        """See `StateHandler`."""
        kind = HeldByOne if self.value.spans_job else PerRank
        return kind(self.value.shard_state_dict, self._take)

    def _take(self, shards: Mapping[int, Any]) -> None:
        if self.value.spans_job:
            self.value._load_shards(list(shards.values()), held=True)
        else:
            self._shards = list(shards.values())

    def end_reset(self) -> None:
        if self._shards:
            self.value.load_shard_state_dicts(self._shards)
            self._shards = []

    def save(self, into: Any) -> Any:
        shard = self.value.shard_state_dict()
        return copy_tree({name: shard[name] for name in ("param_groups", ENTRY) if name in shard})

    def restore(self, saved: Any) -> None:
        self.value.load_state_dict({"state": {}, **copy_tree(saved)})


def handler_for(value: Any) -> StateHandler:
    """Return the handler for a value of this type."""
    if isinstance(value, torch.nn.Module):
        return _ModuleHandler(value)
    if isinstance(value, DistributedOptimizer) and value.synchronizer.commits_shards:
        return _ShardsHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerHandler(value)
    if isinstance(value, ElasticSampler):  # by its type: what `reset` means elsewhere, nobody knows
        return _SamplerHandler(value)
    return _StateDictHandler(value) if has_state_dict(value) else StateHandler(value)
