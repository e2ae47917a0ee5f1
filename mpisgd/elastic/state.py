"""`State`: everything that a training function needs to go on from its last commit."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.consistency import Operation
from mpisgd.elastic.keepers import Keeper, Plain, keeper_for
from mpisgd.elastic.pieces import PerRank, Pieces
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import size

__all__ = ["State"]


class _Commit(NamedTuple):
    """What was kept: a number, higher than those before, and a copy of each value."""

    number: int
    copies: dict[str, Any]


class State:
    """Values that are kept together, put back together, and alike on all ranks.

    Every argument becomes an attribute, which may be assigned and changed at will:

        state = State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    Modules, optimizers and whatever else has `state_dict()` and `load_state_dict()` are kept through these,
    a `PerRank` by a copy on another rank too, and everything else as a plain value, which is copied.

    The last two commits are kept in memory, so they take twice the room of the state itself: a rank that is
    lost in the middle of a commit leaves ranks behind of which some have finished it and some have not.
    """

    def __init__(self, **values: Any) -> None:
        own = [name for name in values if hasattr(type(self), name) or name.startswith("_")]
        if own:
            raise InvalidArgument(f"State: {own[0]!r} cannot be the name of a value; it means something else")
        keepers = {name: keeper_for(value) for name, value in values.items()}
        object.__setattr__(self, "_keepers", keepers)
        self._pieces = Pieces([value for value in values.values() if isinstance(value, PerRank)])
        self._commits: list[_Commit] = []
        self._began = False  # here, and not as one that joins the others
        self._callbacks: list[Callable[[], Any]] = []

    # -- the values -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        keeper = self.__dict__.get("_keepers", {}).get(name)
        if keeper is None:
            raise AttributeError(f"State has no value {name!r}; it has {', '.join(self._names())}")
        return keeper.value

    def __setattr__(self, name: str, value: Any) -> None:
        keepers: dict[str, Keeper] = self.__dict__["_keepers"]
        if name in keepers:
            keepers[name] = keeper_for(value) if not isinstance(keepers[name], Plain) else Plain(value)
        elif name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(
                f"State has no value {name!r} to assign; give it to State(...) first, beside "
                f"{', '.join(self._names())}"
            )

    def _names(self) -> list[str]:
        return list(self.__dict__.get("_keepers", {}))

    # -- for the program ------------------------------------------------------------------------------

    def commit(self) -> None:
        """Keep everything as it is now. Collective: all ranks call it at the same point.

        Cost: one copy of all values on this rank, and one agreement; where there is a `PerRank`, a message of
        its size to one other rank.

        Raises:
            PeerLost: a rank is gone; `run` goes back to this commit if all that are left had finished it, and
                to the one before otherwise.
        """
        self._commit(self.commits + 1)

    def _commit(self, number: int) -> None:
        old = self._commits.pop(0).copies if len(self._commits) == 2 else {}
        copies = {name: keeper.save(old.get(name)) for name, keeper in self._keepers.items()}
        self._pieces.save(number)
        self._commits.append(_Commit(number, copies))
        world().queue.run(Operation("commit", extra=f"number {number}"), lambda: None)

    @property
    def commits(self) -> int:
        """The number of the last commit, which counts those of `run` itself; 0 before the first."""
        return self._commits[-1].number if self._commits else 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called whenever the ranks have changed, when the state has been put back.

        They see the new `rank()` and `size()`; groups of one's own are to be made anew there.
        """
        self._callbacks.extend(callbacks)

    # -- for `run` ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make all values those of rank 0, and commit them. Collective."""
        self._began = True
        self._commits.clear()
        self._sync()
        self.commit()

    def resume(self, newcomers: bool) -> None:
        """Go back to the last commit that all ranks have, and adapt to the ranks there are now. Collective.

        A loss before all had finished the first one leaves none to go back to: the state begins anew.

        Args:
            newcomers: whether there are ranks that have none; they get rank 0's values.
        """
        number = self._latest_common()
        if self._commits and number:
            self._restore(number)
        for keeper in self._keepers.values():
            keeper.reset()
        if newcomers and number:
            self._sync()
        if number:
            self._pieces.restore(number)
        for callback in self._callbacks:
            callback()
        if number:
            self._commit(number + 1)
        else:
            self.begin()

    def _latest_common(self) -> int:
        """Return the last commit that all ranks have but those that have just joined; 0: none. Collective."""
        everyones: list[Any] = [None] * size()
        all_gather_object(everyones, (self.commits, self._began))
        latest: int = min(number for number, began in everyones if began or number)
        return latest

    def _restore(self, number: int) -> None:
        self._commits = [commit for commit in self._commits if commit.number <= number]
        kept = self._commits[-1]
        assert kept.number == number, (kept.number, number)
        for name, keeper in self._keepers.items():
            keeper.restore(kept.copies[name])

    def _sync(self) -> None:
        for keeper in self._keepers.values():
            keeper.sync()
