"""`QuantizingReducer`: every rank's bucket travels in a few bits per element to all others.

Sums of quantized numbers need more bits than each of them, so everyone gets everyone's codes and adds up what
they stand for, in rank order.
"""

from torch import Tensor

from mpisgd.compress.compressor import BucketReducer, Codec
from mpisgd.compress.exchange import gather
from mpisgd.compress.randomness import generator
from mpisgd.compress.residual import ErrorMemory, Waiting
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.transport.torch_reduction import divide

__all__ = ["QuantizingReducer"]


class QuantizingReducer(BucketReducer):
    """Sends a bucket as a codec's bytes, and keeps the error where there is a memory.

    Args:
        codec: for buckets of this layout.
        numel: of the bucket.
        seed: of the random numbers, which differ by step and rank.
        memory: of the error.
        state: what is kept.
    """

    state: Waiting

    def __init__(self, codec: Codec, numel: int, seed: int, memory: ErrorMemory, state: Waiting) -> None:
        self._codec = codec
        self._numel = numel
        self._seed = seed
        self.state, self.memory = state, memory

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the combination of what the ranks' codes stand for."""
        meant = self.memory.add(bucket)
        random = generator(self._seed, self.state.steps, self._numel, group.rank)
        mine = self._codec.compress(meant, random)
        if self.memory.keeps:
            self._codec.decompress(mine, meant, -1)
            self.memory.check()
        bucket.zero_()
        messages = gather(mine, group)
        del mine  # is among them
        for message in messages:
            self._codec.decompress(message, bucket)
        if op is ReduceOp.AVG:
            divide(bucket, group.size)
        self.state.steps += 1

    def bytes_on_the_wire(self, size: int) -> int:
        """Return (size - 1) times the bytes of the codes and what goes with them."""
        return (size - 1) * self._codec.nbytes
