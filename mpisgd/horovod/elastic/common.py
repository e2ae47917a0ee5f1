"""Without torch: `State`, `ObjectState` and the loop that starts a function over."""

import copy
import functools
import queue
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from mpisgd.errors import PeerLost
from mpisgd.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["ObjectState", "State", "run_fn"]

REMOVED = 1  # of what `on_hosts_updated` is told: 1 removed, 2 added, 3 both
MAX_RETRIES = 3
RETRIED = "mpisgd.horovod: elastic: back to the last commit, since an operation failed"


class State:
    """State from which a training function can start again. Base class.

    Args:
        bcast_object: a function that returns rank 0's object on every rank, such as `hvd.broadcast_object`.
        get_rank: a function that returns the rank, such as `hvd.rank`.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._updated_at: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._num_commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions that are called after every reset, before the state is broadcast."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the present ranks."""
        self._messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that ranks are added or removed; the next check on rank 0 tells all ranks. From any thread.

        Args:
            timestamp: a call whose timestamp is not newer than the last one is ignored.
            update_res: 1: ranks were removed, 2: added, 3: both.
        """
        self._messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, then check whether ranks are added or removed. Collective.

        Raises:
            HostsUpdatedInterrupt: they are; raised on all ranks.
        """
        self.save()
        self._num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if rank 0 knows of a change of ranks. Collective."""
        latest, results = self._updated_at, 0
        while not self._messages.empty():
            timestamp, result = self._messages.get()
            if timestamp > latest:
                latest, results = timestamp, results | result
        before, self._updated_at, results = self._bcast_object((self._updated_at, latest, results))
        if self._updated_at > before:
            raise HostsUpdatedInterrupt(skip_sync=results == REMOVED)

    def save(self) -> None:
        """Save the present values."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the values that were saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the values of rank 0, and save them. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt what depends on the number of ranks."""


class ObjectState(State):
    """Python objects, which are attributes of the state and may be assigned and changed at will.

    Args:
        bcast_object, get_rank: as for `State`.
        kwargs: the attributes and their first values; anything that can be copied and pickled.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._assign(kwargs)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Copy the attributes."""
        self._saved_state = copy.deepcopy(self._current())

    def restore(self) -> None:
        """Give the attributes the values they were saved with."""
        self._assign(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Give the attributes rank 0's values, and save them. Collective."""
        if self._saved_state:
            self._assign(self._bcast_object(self._current()))
        ObjectState.save(self)

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _assign(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that calls `func(state, ...)` until it returns.

    Args:
        func: what to call; it raises where it is to be called again.
        reset: called in between, before the state's own `on_reset`.
    """

    @functools.wraps(func)
    def started_over(state: State, *args: Any, **kwargs: Any) -> Any:
        failures: deque[tuple[int, str]] = deque(maxlen=MAX_RETRIES)
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as exc:
                if not isinstance(exc.__cause__, PeerLost):  # each rank can be lost but once
                    failures.append((state._num_commits, str(exc)))
                    if failures.count(failures[-1]) == MAX_RETRIES:  # with no commit in between
                        raise
                    if state._rank() == 0:
                        print(f"{RETRIED}: {exc}", file=sys.stderr, flush=True)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as exc:
                skip_sync = exc.skip_sync
            reset()
            state.on_reset()

    return started_over
