"""`NetworkStore`: torch's key-value store between hosts, by connections that MPI has authenticated.

torch's own TCPStore listens as long as it lives, takes whoever connects for a rank, and connects again for
each `clone()`. Here the connections are made once, by a handshake with a secret that MPI brings, and nobody
listens afterwards: a clone is the store itself, and asks by the connection that there is.
"""

from collections.abc import Sequence
from concurrent.futures import TimeoutError as NotInTime
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from mpisgd.arguments import shown
from mpisgd.threads import wait_registry
from mpisgd.transport.tcp_store.links import Link
from mpisgd.transport.tcp_store.table import AMOUNT, Operation

__all__ = ["NetworkStore"]

# torch's C++ calls what is here through a reference that does not keep the Python object.
_open: "list[NetworkStore]" = []


class NetworkStore(Store):
    """A store of which rank 0 keeps the table. Its methods are those of torch's stores.

    It lives until `close`, or until the process ends.

    Args:
        link: to the table.
        address: the one of rank 0 that all ranks have reached.
    """

    def __init__(self, link: Link, address: str) -> None:
        super().__init__()
        self.host = address
        self._link = link
        _open.append(self)

    def _ask(self, operation: Operation, *fields: bytes, timeout: timedelta | None = None) -> Sequence[bytes]:
        question = self._link.ask(operation, fields)
        limit = (timeout or cast(Any, self).timeout).total_seconds()  # torch's annotations forget it
        wait_registry.workers[id(question)] = lambda: True  # has a limit: nobody may say that it never ends
        try:
            return question.result(limit)
        except NotInTime:
            self._link.forget(question)
            keys = ", ".join(shown(field.decode(errors="replace")) for field in fields[:3])
            raise DistStoreError(f"store: nobody has set {keys} within {limit:g} s") from None
        except ConnectionError as exc:
            raise DistNetworkError(f"store: {exc}") from None
        finally:
            wait_registry.workers.pop(id(question), None)

    def set(self, key: str, value: Any) -> None:
        """Set a key; what is there is replaced."""
        self._ask(Operation.SET, key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value; waits for it as long as the store's timeout says."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of some keys; waits for them."""
        return list(self._ask(Operation.GET, *(key.encode() for key in keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set some keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are set."""
        self._ask(Operation.GET, *(key.encode() for key in keys), timeout=timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum."""
        return int(AMOUNT.unpack(self._ask(Operation.ADD, key.encode(), AMOUNT.pack(amount))[0])[0])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key to `desired` where it is `expected` (an absent one: ""); return what is there then."""
        return self._ask(Operation.COMPARE_SET, key.encode(), _bytes(expected), _bytes(desired))[0]

    def append(self, key: str, value: Any) -> None:
        """Append to a key's value."""
        self._ask(Operation.APPEND, key.encode(), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are set."""
        return bool(self._ask(Operation.CHECK, *(key.encode() for key in keys))[0])

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return bool(self._ask(Operation.DELETE, key.encode())[0])

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return int(AMOUNT.unpack(self._ask(Operation.COUNT)[0])[0])

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` work."""
        return True

    def clone(self) -> "NetworkStore":
        """Return the store itself: any number of threads may use it."""
        return self

    # The names by which torch's C++ looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def close(self) -> None:
        """End this rank's connection. Nothing of torch's may use the store any more."""
        if self in _open:
            _open.remove(self)
            self._link.close()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
