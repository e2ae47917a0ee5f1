"""`Replicated`: every rank has all parameters, and updates all of them with the same gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.strategies.strategy import Synchronizer
from mpisgd.strategies.training import Training

__all__ = ["Replicated"]

COMPRESSION = "compression"  # the entry of a state_dict


class Replicated(Synchronizer):
    """Has gradients reduced, and keeps what compressors keep of them from step to step."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.gradients: GradientReducer = self._make_reducer()

    def _make_reducer(self) -> GradientReducer:
        return GradientReducer(self.training.named, self.training.group, self.training.options)

    def consensus(self) -> Sequence[Tensor]:
        """Return the parameters as they are."""
        return [tensor.clone() for tensor in self.averaged]

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state, and what compressors keep of this rank's gradients."""
        kept = self.gradients.compression_state.state_dict()
        return {**make(), COMPRESSION: kept} if kept else make()

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Give compressors back what they had kept, as far as it is this rank's; see `CompressionState`."""
        self.gradients.compression_state.load_state_dict(state_dict.get(COMPRESSION, {}))

    def move_to(self, group: Group) -> None:
        """Go on with other ranks; compressors keep this rank's own, and what others had kept is lost."""
        super().move_to(group)
        kept = self.gradients.compression_state
        self.gradients = self._make_reducer()
        self.gradients.compression_state.take_over(kept)
