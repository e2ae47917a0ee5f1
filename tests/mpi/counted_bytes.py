"""How many bytes ranks send."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from verdicts import referee

from mpisgd.core.group import Group


def state_bytes(state: dict[Any, Any]) -> int:
    """The bytes of an optimizer's state, its `state_dict()["state"]`."""
    tensors = [value for entries in state.values() for value in entries.values()]
    return sum(tensor.nbytes for tensor in tensors)


def sent(monkeypatch: pytest.MonkeyPatch, group: Group, action: Callable[[], Any]) -> int:
    """The bytes that all ranks of a group send meanwhile, those of objects included."""
    communicator, objects = group.queue.communicator, []
    senders = [communicator, group.point_to_point.communicator]
    before = sum(each.sent_bytes for each in senders)
    broadcast, gather = type(communicator).broadcast_object, type(communicator).all_gather_object

    def counted_broadcast(self, obj, root):
        got = broadcast(self, obj, root)
        if self.rank == root:
            objects.append((self.size - 1) * _length(got))
        return got

    def counted_gather(self, obj):
        objects.append((self.size - 1) * _length(obj))
        return gather(self, obj)

    with monkeypatch.context() as patched:
        patched.setattr(type(communicator), "broadcast_object", counted_broadcast)
        patched.setattr(type(communicator), "all_gather_object", counted_gather)
        action()
    tensors = sum(each.sent_bytes for each in senders) - before
    return sum(referee().allgather(tensors + sum(objects)))


def _length(obj: Any) -> int:
    return len(obj) if isinstance(obj, bytes) else len(pickle.dumps(obj))
