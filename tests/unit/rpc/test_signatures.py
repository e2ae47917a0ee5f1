"""What RPC unpickles: nothing that is not signed by the job's key."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.rpc import api, internal

from mpisgd.errors import MpisgdError
from mpisgd.rpc.signatures import DIGEST_BYTES, KEY_BYTES, sign_messages

KEY = bytes(range(KEY_BYTES))


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def test_what_is_signed_is_read_with_its_tensors():
    tensor = torch.arange(3.0)
    with sign_messages(KEY):
        pickled, tensors = internal.serialize({"a": tensor, "b": [1, "x"]})
        found = internal.deserialize(pickled, tensors)
    assert found["a"] is tensor
    assert found["b"] == [1, "x"]


@pytest.mark.parametrize("key", [None, b"x" * KEY_BYTES], ids=["not signed", "of another start"])
def test_what_a_stranger_has_pickled_is_not_unpickled(tmp_path, key):
    trace = tmp_path / "unpickled"
    if key is None:
        pickled, tensors = internal.serialize(Trap(str(trace)))
    else:
        with sign_messages(key):
            pickled, tensors = internal.serialize(Trap(str(trace)))
    with sign_messages(KEY), pytest.raises(MpisgdError, match="not signed by a rank of this job"):
        internal.deserialize(pickled, tensors)
    assert not trace.exists()


def test_no_byte_of_a_message_can_be_changed():
    with sign_messages(KEY):
        pickled, tensors = internal.serialize((len, ("abc",), {}))
        for place in range(len(pickled)):
            changed = bytearray(pickled)
            changed[place] ^= 1
            with pytest.raises(MpisgdError, match="not signed"):
                internal.deserialize(bytes(changed), tensors)
        for cut in (0, 1, DIGEST_BYTES - 1, DIGEST_BYTES, len(pickled) - 1):
            with pytest.raises(MpisgdError, match="not signed"):
                internal.deserialize(pickled[:cut], tensors)


def test_torchs_own_pickler_is_back_afterwards():
    before = internal._internal_rpc_pickler, api._default_pickler
    with sign_messages(KEY):
        assert internal._internal_rpc_pickler is api._default_pickler is not before[0]
    assert (internal._internal_rpc_pickler, api._default_pickler) == before
