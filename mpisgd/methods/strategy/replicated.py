"""`Replicated`: every rank has all parameters, and updates all of them with the same gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.destination import Destination
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.method_state import part
from mpisgd.methods.strategy.strategy import Synchronizer
from mpisgd.methods.strategy.training import Training

__all__ = ["KeptByCompressors", "Replicated", "reducer_of"]


@dataclass
class KeptByCompressors:
    """What is kept from step to step: what compressors keep of gradients."""

    compression: CompressionState = part(CompressionState)


class Replicated(Synchronizer):
    """Has gradients reduced, and keeps what compressors keep of them from step to step."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.state = KeptByCompressors()

    def open(self) -> None:
        """See `Synchronizer`."""
        self.gradients: GradientReducer = reducer_of(self.training, self.state.compression)

    @property
    def method(self) -> str:
        """See `Synchronizer`: where parameters and state lie is no other method."""
        return "Synchronous"

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: what compressors keep follows the buckets."""
        return {}

    def consensus(self) -> Sequence[Tensor]:
        """Return the parameters as they are."""
        return [tensor.clone() for tensor in self.averaged]


def reducer_of(
    training: Training, kept: CompressionState, destination: Destination | None = None
) -> GradientReducer:
    """Return the reducer of the gradients of all parameters.

    Args:
        training: what it works on.
        kept: what compressors keep.
        destination: see `GradientReducer`.
    """
    return GradientReducer(training.named, training.group, training.options, destination, kept)
