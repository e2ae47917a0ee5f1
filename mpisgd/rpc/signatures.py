"""What RPC unpickles is signed: no byte of it is looked at that a rank of the job has not written.

torch pickles functions, arguments and results with a pickler of its own, and unpickles whatever comes in.
Here each pickle begins with its HMAC under a key that rank 0 has drawn for this start and sent by MPI. It is
the second lock: the first keeps strangers from sending anything (`mpisgd.rpc.admission`). Tensors travel
apart from their pickle, and calls of torch's own operators have none: neither is signed.
"""

import contextlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.rpc import api, internal

from mpisgd.errors import MpisgdError

__all__ = ["KEY_BYTES", "SignedPickler", "sign_messages"]

_Pickler: Any = internal._InternalRPCPickler

KEY_BYTES = 32
DIGEST = "sha256"
DIGEST_BYTES = 32


class SignedPickler(_Pickler):  # type: ignore[misc]  # torch's is not annotated
    """torch's pickler of RPC, whose pickles are signed.

    Args:
        key: that the ranks share and nobody else has.
        pickler: torch's own, in which types may be registered later, too.
    """

    def __init__(self, key: bytes, pickler: Any) -> None:
        super().__init__()
        self._key = key
        self._class_reducer_dict = pickler._class_reducer_dict

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Return an object's signature and pickle in one, and its tensors."""
        pickled, tensors = super().serialize(obj)
        return hmac.digest(self._key, pickled, DIGEST) + pickled, tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        """Return the object.

        Raises:
            MpisgdError: it is not signed by a rank of the job; nothing of it was unpickled.
        """
        signature, pickled = binary_data[:DIGEST_BYTES], binary_data[DIGEST_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, pickled, DIGEST)):
            raise MpisgdError("rpc: a message is not signed by a rank of this job, and was not read")
        return super().deserialize(pickled, tensor_table)


@contextlib.contextmanager
def sign_messages(key: bytes) -> Iterator[None]:
    """Have torch's RPC sign what it sends, and read only what is signed."""
    plain = internal._internal_rpc_pickler
    signed = SignedPickler(key, plain)
    _use(signed)
    try:
        yield
    finally:
        _use(plain)


def _use(pickler: Any) -> None:
    internal._internal_rpc_pickler = pickler
    api._default_pickler = pickler
