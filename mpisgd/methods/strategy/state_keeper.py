"""`StateKeeper`: saves, loads, compares and renews what a strategy keeps; see `mpisgd.method_state`.

`load_state_dict` is not collective, so what becomes of a state is found out by all ranks together, before
the first step after it. Whether each rank has its own back: where one has not, what is to be rebuilt begins
anew on all. Whether what is alike really is: a rank that has loaded another file, or has just joined, is told
so. The same comes after a change of the ranks.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from mpisgd.arguments import texts_with_ranks
from mpisgd.compress.compressor import Casting, Compressor, inner_of
from mpisgd.core.consistency import Operation
from mpisgd.errors import OutOfSync
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.method_state import (
    ENTRY,
    REBUILD,
    Pieces,
    check_version,
    entry_of,
    forget_own,
    has_rebuilt,
    own_of,
    pieces_of,
    restart,
    take,
    without_parts,
)
from mpisgd.methods.strategy.state_digests import digests
from mpisgd.methods.strategy.strategy import Synchronizer

__all__ = ["StateKeeper"]


class StateKeeper:
    """Does for a synchronizer what must be done with its state, around the steps of an optimizer.

    Args:
        synchronizer: whose state it is.
    """

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._of = synchronizer
        self._begun: set[str] = set()  # keys of tensors that have entries
        self._is_due = True  # to begin and to derive, before the next step
        self._compares = False  # what ranks have, before that
        self._has_own = True  # False: it begins anew on this rank, and maybe on all, before the next step

    @property
    def _keeps(self) -> bool:
        return self._of.state is not None or self._of.replicas_differ

    # -- before a step ------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self) -> None:
        """See to it that a step can be taken. Collective where something is due.

        Raises:
            OutOfSync: the ranks have not got the same of what is alike; on every rank.
        """
        if not self._keeps or not (self._of.has_changed() or self._is_due):
            return
        if self._compares:
            self._compare()
        new = {key: tensor for key, tensor in self._of.tensors().items() if key not in self._begun}
        if new:
            self._of.begin(new)
            self._begun.update(new)
        self._of.derive()
        self._is_due = self._compares = False
        self._has_own = True  # also where it was lost, and there was nothing to compare

    def _compare(self) -> None:
        """Raise where ranks differ in what is alike; begin anew where one has lost what all must have."""
        self._of.arrive()
        alike = digests(pieces_of(self._of.state).alike)
        mine = {"number of steps": self._of.num_steps, "parameters with a state": len(self._begun), **alike}
        told: list[tuple[dict[str, Any], bool]] = []
        queue = self._of.training.group.queue
        queue.run(
            Operation("state of the strategy", extra=f"{self._of.method}, after a load or other ranks"),
            lambda: told.extend(queue.communicator.all_gather_object((mine, self._has_own))),
        )
        names = {name: None for of_one, _ in told for name in of_one}
        if differing := [name for name in names if len({str(each.get(name)) for each, _ in told}) > 1]:
            raise OutOfSync(self._report(differing[0], [each.get(differing[0]) for each, _ in told]))
        if not all(has_own for _, has_own in told) and has_rebuilt(self._of.state):
            forget_own(self._of.state, only=REBUILD)
            self._begun.clear()

    def _report(self, name: str, values: list[Any]) -> str:
        held = texts_with_ranks(self._of.training.group.ranks, map(str, values))
        return (
            f"DistributedOptimizer: the ranks go on from different states of {self._of.method}: {name} is "
            f"{held}; load states of the same step on all ranks, or call mpisgd.broadcast_optimizer_state("
            "optimizer), and broadcast_parameters(model), after the load or once new ranks have joined"
        )

    # -- other parameters, other ranks --------------------------------------------------------------

    def extended(self) -> None:
        """Note that there are further parameters."""
        self._is_due = True

    def moved(self) -> None:
        """Note that the ranks have changed: each keeps its own, but for what says something of the others."""
        if has_rebuilt(self._of.state):
            self._has_own = False
        self._is_due = self._compares = True

    def forget_own(self) -> None:
        """Begin anew with what is this rank's own; all ranks do so, and the others have loaded the rest."""
        self._of.bring_home()
        self._of.is_fresh = True
        self._compares = bool(self.entry())
        if not self._compares and self._keeps:  # they have loaded that nothing is kept, see `load`
            self._of.num_steps = 0
        forget_own(self._of.state)
        self._has_own = False
        self._is_due = True

    # -- save and load ------------------------------------------------------------------------------

    def entry(self) -> dict[str, Any]:
        """Return the method's part of a state_dict: {} where nothing is kept."""
        if not self._keeps:
            return {}
        self._of.arrive()
        pieces, training = pieces_of(self._of.state), self._of.training
        # Whether this rank has anything does not decide: with PerHost some have nothing, and all compare.
        may_have = self._of.replicas_differ or not isinstance(training.options.compression, Casting)
        if not (may_have or pieces.alike or pieces.own):
            return {}
        return entry_of(
            pieces,
            of=self._of.method,
            compression=family(training.options.compression),
            rank=training.group.rank,
            size=training.group.size,
            steps=self._of.num_steps,
            begun=self._begun,
            has_own=self._has_own or not has_rebuilt(self._of.state),
        )

    @staticmethod
    def check(state_dict: Mapping[str, Any]) -> None:
        """Raise where a state cannot be read.

        Raises:
            InvalidArgument: it was written by another version of mpisgd; says which.
        """
        if ENTRY in state_dict:
            check_version(state_dict[ENTRY])

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `entry` has returned, as far as it is of the same method. Not collective.

        Without an entry, or with one of another method, the parameters count as they are.
        """
        synchronizer, entry = self._of, state_dict.get(ENTRY)
        if entry is not None and entry["of"] != synchronizer.method:
            self._warn(f"of {entry['of']}, and this optimizer trains by {synchronizer.method}")
            entry = None
        if not self._keeps:
            return
        self._begun.clear()
        self._is_due = True
        self._compares = synchronizer.replicas_differ or entry is not None
        if entry is None:
            restart(synchronizer.state)
            synchronizer.num_steps, self._has_own = 0, True
        else:
            self._take(entry)

    def _take(self, entry: Mapping[str, Any]) -> None:
        synchronizer = self._of
        group, compressor = synchronizer.training.group, synchronizer.training.options.compression
        pieces, loses = Pieces(entry["alike"], entry["own"] or {}), False
        others = without_parts(synchronizer.state, pieces, CompressionState)
        if entry["compression"] != family(compressor) and pieces != others:
            self._warn(
                f"compressed by {entry['compression']}, and this optimizer's compression is {compressor}"
            )
            pieces = others
            loses = has_rebuilt(synchronizer.state)  # it may say what belongs to what was left out
        self._has_own = own_of(entry, group.rank, group.size) is not None and not loses
        own = pieces.own if self._has_own else None
        take(synchronizer.state, pieces.alike, own, synchronizer.parameters_by_key())
        self._begun.update(entry["begun"])
        synchronizer.num_steps = entry["steps"]

    def _warn(self, what: str) -> None:
        """Warn once, on the group's first rank."""
        if self._of.training.group.rank == 0:
            text = f"load_state_dict: the state is {what}; what the former has kept is left out"
            warnings.warn(text, RuntimeWarning, stacklevel=5)


def family(compressor: Compressor) -> str:
    """Return the classes of a compressor's state: its own, and that of one inside it."""
    return type(compressor).__name__ + "".join(f"({family(each)})" for each in inner_of(compressor))
