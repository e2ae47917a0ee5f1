"""`State`: what a training function needs to continue from its last commit."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.consistency import Operation
from mpisgd.elastic.buddy_replicas import BuddyReplicas, PerRank
from mpisgd.elastic.state_handlers import StateHandler, handler_for
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import size

__all__ = ["State"]


class _Committed(NamedTuple):
    """A value of a commit.

    Attributes:
        handler: of the object that the value was then; another may have been assigned since.
        saved: its copy.
    """

    handler: StateHandler
    saved: Any


def _commit(handler: StateHandler, old: _Committed | None) -> _Committed:
    """Return a copy of a value, in the memory of an older one where that fits."""
    fits = old is not None and type(old.handler) is type(handler)
    return _Committed(handler, handler.save(old.saved if old is not None and fits else None))


class State:
    """Values that are committed and restored together.

    Every argument becomes an attribute, which may be assigned and changed at will:

        state = State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    Modules, optimizers and other objects with `state_dict()` and `load_state_dict()` are saved through these
    methods. A `PerRank` also has a replica on another rank. Everything else is saved by a deep copy.

    The last two commits stay in memory and take twice the memory of the state: when a rank is lost during a
    commit, some of the other ranks have finished it and some have not.
    """

    def __init__(self, **values: Any) -> None:
        own = [name for name in values if hasattr(type(self), name) or name.startswith("_")]
        if own:
            raise InvalidArgument(f"State: {own[0]!r} cannot be the name of a value; State itself uses it")
        handlers = {name: handler_for(value) for name, value in values.items()}
        object.__setattr__(self, "_handlers", handlers)
        self._replicas = BuddyReplicas()
        self._commits: dict[int, dict[str, _Committed]] = {}  # by number, oldest first
        self._began = False  # as an original rank, not as a joiner
        self._callbacks: list[Callable[[], Any]] = []

    # -- the values -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        handlers: dict[str, StateHandler] = self.__dict__.get("_handlers", {})
        if name not in handlers:
            raise AttributeError(f"State has no value {name!r}; it has {', '.join(handlers)}")
        return handlers[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        handlers: dict[str, StateHandler] = self.__dict__["_handlers"]
        if name in handlers:
            was_plain = type(handlers[name]) is StateHandler
            handlers[name] = StateHandler(value) if was_plain else handler_for(value)
        elif name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(
                f"State has no value {name!r} to assign; give it to State(...) first, beside "
                f"{', '.join(handlers)}"
            )

    # -- for the program ------------------------------------------------------------------------------

    def commit(self) -> None:
        """Save all values in memory. Collective: all ranks call it at the same point.

        Cost: one copy of all values on this rank and one barrier; with a `PerRank` also one message of its
            size to another rank.

        Raises:
            PeerLost: a rank is gone; `run` restores this commit if all remaining ranks had finished it, and
                the one before otherwise.
        """
        self._commit(self.commits + 1)

    def _commit(self, number: int) -> None:
        old = self._commits.pop(min(self._commits)) if len(self._commits) == 2 else {}
        committed = {name: _commit(handler, old.get(name)) for name, handler in self._handlers.items()}
        self._replicas.save(number, self._per_rank())
        self._commits[number] = committed
        world().queue.run(Operation("commit", extra=f"number {number}"), lambda: None)

    def _per_rank(self) -> dict[str, PerRank]:
        """Return the values that differ between ranks now: they may have been assigned meanwhile."""
        found = {name: handler.per_rank for name, handler in self._handlers.items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def commits(self) -> int:
        """The number of the last commit, those of `run` included; 0 before the first."""
        return max(self._commits, default=0)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to be called after each change of the ranks, when the state is restored.

        They see the new `rank()` and `size()`. Programs create their own groups again there.
        """
        self._callbacks.extend(callbacks)

    # -- for `run` ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Broadcast the values of rank 0 and commit them. Collective."""
        self._began = True
        self._commits.clear()
        for handler in self._handlers.values():
            handler.sync()
        self.commit()

    def resume(self, joiners: bool) -> None:
        """Restore the last commit that all ranks have and adapt it to the present ranks. Collective.

        If a rank was lost before all had finished the first commit, the state begins again.

        Args:
            joiners: whether there are new ranks, which have no commit; they get rank 0's values.
        """
        number = self._latest_common()
        if self._commits and number:
            self._commits = {known: commit for known, commit in self._commits.items() if known <= number}
            for name, (handler, saved) in self._commits[number].items():
                self._handlers[name] = handler
                handler.restore(saved)
        for handler in self._handlers.values():
            handler.reset()
        if joiners and number:
            self._tell_joiners()
        if number:
            self._replicas.restore(number, self._per_rank())
        for callback in self._callbacks:
            callback()
        for handler in self._handlers.values():
            handler.end_reset()
        if number:
            self._commit(number + 1)
        else:
            self.begin()

    def _tell_joiners(self) -> None:
        """Give new ranks the values of rank 0; the others keep what is their own. Collective."""
        is_new = not self._commits
        kept = [None if is_new else handler.keep_own() for handler in self._handlers.values()]
        for handler in self._handlers.values():
            handler.sync()
        for handler, mine in zip(self._handlers.values(), kept, strict=True):
            handler.return_own(mine)

    def _latest_common(self) -> int:
        """Return the last commit that all ranks but the joiners have; 0 without one. Collective."""
        gathered: list[Any] = [None] * size()
        all_gather_object(gathered, (self.commits, self._began))
        latest: int = min(number for number, began in gathered if began or number)
        return latest
