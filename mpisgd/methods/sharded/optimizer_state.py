"""`OptimizerState`: the wrapped optimizer's state, of which each rank has that of its pieces.

Where it is, and what may follow, is a `StatePlace`. Whether the pieces are in memory, in files or on a device
is known to `Pieces` alone, and where their state is to the `StateStore`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.methods.strategy.divided_state import DividedState
from mpisgd.methods.strategy.hidden_parameters import HiddenParameters
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.masters import RefreshMasters
from mpisgd.sharding.needed_parts import NeededPart
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.disk_speed import blocks_of
from mpisgd.sharding.offload.error_agreement import raised_on_every_rank
from mpisgd.sharding.offload.file_store import FileStore
from mpisgd.sharding.offload.state_store import StateInMemory, StateStore
from mpisgd.sharding.piece import MASTER, WRITTEN, Entries, Pieces
from mpisgd.sharding.piece_states import PieceNames, PieceStates
from mpisgd.sharding.places import StatePlace

__all__ = ["OptimizerState"]


class OptimizerState:
    """Gives the optimizer what it is to update in a step, with the state of that, and takes both back.

    Collective to make.

    Args:
        training: the optimizer, the parameters and the ranks.
        pieces: of this rank.
        offload: where their state is kept; None: in memory.
        hidden: what the optimizer does not see in a step.

    Attributes:
        of_pieces: the state of the pieces.
    """

    def __init__(
        self,
        training: Training,
        pieces: Pieces,
        offload: Offload | None,
        hidden: HiddenParameters,
    ) -> None:
        self._optimizer_ref, self._group = training.optimizer_ref, training.group
        self._pieces, self._hidden = pieces, hidden
        self._names = PieceNames(pieces, [name for name, _ in training.named])
        params = [param for _, param in training.named]
        store = self._make_store(offload)
        self.of_pieces = PieceStates(params, pieces, training.group, store)

    def _make_store(self, offload: Offload | None) -> StateStore:
        """Return where the state of the pieces is kept. Collective."""
        if offload is None or offload.folder is None:
            return StateInMemory()
        with raised_on_every_rank(self._group):
            blocks = blocks_of(offload, f"optimizer state of rank {self._group.rank}")
            return FileStore(offload, blocks, self._names, 2 * len(self._pieces.pieces))

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None
        return optimizer

    @property
    def store(self) -> StateStore:
        """Where the state of the pieces is kept."""
        return self.of_pieces.state

    @property
    def is_whole(self) -> bool:
        """Whether the optimizer has the state of all parameters."""
        return self.of_pieces.where is StatePlace.WHOLE

    @property
    def _is_with_pieces(self) -> bool:
        """Whether the state is with the pieces, and not with the optimizer, between steps."""
        return self._pieces.divided or isinstance(self.store, FileStore)

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a list of parameters that has grown at its end."""
        self.of_pieces.params = [param for _, param in named]
        self._names.names = [name for name, _ in named]

    # -- around a step ------------------------------------------------------------------------------

    @property
    def is_hidden(self) -> bool:
        """Whether the optimizer does not see its parameters now."""
        return bool(self._hidden)

    def hide(self) -> None:
        """Take all parameters from the optimizer, and give it the state of the pieces."""
        self._hidden.hide(self._optimizer, self.of_pieces.lend() if self._is_with_pieces else None)

    def show(self) -> bool:
        """Give the optimizer all its parameters back; False if it has them."""
        was_hidden = self._hidden.show(self._optimizer)
        if was_hidden:
            self.of_pieces.take_back()
        return was_hidden

    def take_over(self) -> None:
        """Take this rank's part of a state that is whole."""
        if self._is_with_pieces:
            self.of_pieces.take_over(self._optimizer.state)

    # -- saved and loaded; the optimizer sees its parameters ------------------------------------------

    def state_dict(self, make: Callable[[], dict[str, Any]], *, is_wanted: bool = True) -> dict[str, Any]:
        """Return the state of all parameters; `make` returns what the optimizer has now. Collective.

        Where it is not wanted, what other ranks have is not among it.

        One that was loaded here counts, although it may not have been loaded where its owners are. Who saves
        the state saves the parameters, too, which are there then.
        """
        RefreshMasters()(self._pieces.pieces)
        of_pieces, state = self.of_pieces, self._optimizer.state
        loaded = of_pieces.wholes_in(state) if self.is_whole else None
        wholes = of_pieces.gather(loaded, is_wanted=is_wanted and not self.is_whole)
        if self.is_whole:
            return make()
        params = of_pieces.params
        wholes = {index: _without_same(whole, params[index]) for index, whole in wholes.items()}
        wholes = {index: whole for index, whole in wholes.items() if _says_more(whole, params[index])}
        with of_pieces.shown_in(state, wholes):
            return make()

    def loaded(self) -> None:
        """Note that the optimizer has the state of all parameters."""
        self.of_pieces.loaded()

    def needed_parts(self) -> dict[int, NeededPart] | None:
        """Return the parts that this rank needs of a state that is loaded; None: all of it."""
        return self.of_pieces.needed_parts() if self._is_with_pieces else None

    def load_parts(self) -> None:
        """Take over from the optimizer a state of which it has what this rank needs. Not collective.

        Raises:
            OffloadError: it cannot be stored; nor can a step be taken then, on any rank.
        """
        self.loaded()
        self.take_over()
        self._optimizer.state = DividedState()
        self.store.end_step()

    def to_shard(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank's pieces, and the options of all groups."""
        RefreshMasters()(self._pieces.pieces)
        self.take_over()
        store = self.store if self._is_with_pieces else StateInMemory(self._optimizer.state)
        return {"param_groups": make()["param_groups"], **self.of_pieces.to_shard(store)}

    def load_shards(
        self, shards: Sequence[Mapping[str, Any]], load: Callable[[dict[str, Any]], Any], ranges: Any = None
    ) -> None:
        """Take this rank's part of what the ranks of a run had; see `PieceStates.from_shards`.

        Args:
            shards: of these ranks.
            load: the wrapped optimizer's own function that loads a state dict.
            ranges: what each owner has, where each rank gives those that it holds.
        """
        states, head = self.of_pieces.from_shards(shards, ranges)
        load({"state": {}, "param_groups": head["param_groups"]})
        state = self._optimizer.state
        state.update({self.of_pieces.params[index]: entries for index, entries in states.items()})
        state.update(head["others"])
        self.loaded()
        with self.store.shared_errors(self._group):
            self.take_over()
        if not self._is_with_pieces:
            self.of_pieces.place(state)


def _without_same(entries: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return the state of a parameter without a master that is no more precise, and equal to it."""
    master = entries.get(MASTER)
    if master is None or master.dtype != param.dtype or not torch.equal(master, param.detach()):
        return entries
    return {key: value for key, value in entries.items() if key not in (MASTER, WRITTEN)}


def _says_more(entries: Entries, param: Tensor) -> bool:
    """Return whether the state of a parameter says more than the parameter does."""
    if not entries or set(entries) != {MASTER}:
        return bool(entries)
    master = entries[MASTER]
    return not torch.equal(master, param.detach().to(master.dtype))
