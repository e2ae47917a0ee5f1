"""`Replicated`: every rank has all parameters, and updates all of them with the same gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.method_state import part
from mpisgd.methods.strategy.strategy import Synchronizer
from mpisgd.methods.strategy.training import Training

__all__ = ["KeptByCompressors", "Replicated"]


@dataclass
class KeptByCompressors:
    """What is kept from step to step: what compressors keep of gradients."""

    compression: CompressionState = part(CompressionState)


class Replicated(Synchronizer):
    """Has gradients reduced, and keeps what compressors keep of them from step to step."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.state = KeptByCompressors()
        self._open_reducer()

    @property
    def method(self) -> str:
        """See `Synchronizer`: where parameters and state lie is no other method."""
        return "Synchronous"

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: what compressors keep follows the buckets."""
        return {}

    def _open_reducer(self) -> None:
        training = self.training
        self.gradients: GradientReducer = GradientReducer(training.named, training.group, training.options)
        self.gradients.compression_state = self.state.compression

    def consensus(self) -> Sequence[Tensor]:
        """Return the parameters as they are."""
        return [tensor.clone() for tensor in self.averaged]

    def move_to(self, group: Group) -> None:
        """Go on with other ranks; compressors keep this rank's own, and what others had kept is lost."""
        super().move_to(group)
        self.state.compression.move_to(())  # lets go of the buckets, whose memory is that of the ranks before
        self._open_reducer()
