"""`LocalSynchronizer`: what strategies have in common whose ranks take steps by themselves."""

import abc
from collections.abc import Mapping

import torch
from torch import Tensor

from mpisgd.collectives.coalesced import broadcast_coalesced
from mpisgd.method_state import ZEROS, begins_of
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, needs_none, no, yes
from mpisgd.methods.strategy.local_scaling import LocalScaling
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training

__all__ = ["LOCAL_STEPS", "WEIGHTED", "LocalSynchronizer"]

WEIGHTED = "means weighted by examples"  # how a method goes with uneven data

OWN_GRADIENTS = no("ranks step with gradients of their own")
LOCAL_STEPS = GoesWith(
    op=OWN_GRADIENTS,
    gradient_predivide_factor=OWN_GRADIENTS,
    error_if_nonfinite=OWN_GRADIENTS,
    check_in_sync_every=no("parameters differ by rank between two steps"),
    share_parameters=no("every rank has parameters of its own"),
    compression=Compressions("no", (needs_none,)),  # what one sends by is for it to say
    backward_passes_per_step=yes("local"),
    clip_grad_norm_=yes("of the own gradients"),
    grad_scaler=yes("yes, a rank's overflow skips its own step"),
    sparse_gradients=yes(),
    uneven_data=no("what a rank without data counts is not defined"),
    context_parallel=no("parameters differ by rank between two steps"),
    elastic=yes("survivors go on from their own models"),
    checkpoint=yes("has the model of each rank"),
)


class LocalSynchronizer(Synchronizer, abc.ABC):
    """Synchronises after steps, in which a GradScaler leaves out what is not finite on a rank."""

    replicas_differ = True

    def __init__(self, training: Training, strategy: Strategy | None = None) -> None:
        super().__init__(training, strategy)
        self._scaling = LocalScaling(training.optimizer)

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the entries of which `state` declares what they begin as, but for those that are there."""
        for name, what in begins_of(self.state).items():
            entries = getattr(self.state, name)
            new = {key: tensor for key, tensor in tensors.items() if key not in entries}
            zeros = what == ZEROS
            entries.update(
                {k: torch.zeros_like(t) for k, t in new.items()} if zeros else self.common_copies(new)
            )

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Do what is due after step number `self.num_steps`; without autograd."""

    def before_step(self) -> None:
        """Take over what a GradScaler says.

        A step that it would leave out changes nothing; the other ranks may wait in it.
        """
        self._scaling.before_step(self.training.optimizer)

    def before_zero_grad(self) -> None:
        """See `Synchronizer`."""
        self._scaling.forget()

    def after_step(self, num_steps: int) -> None:
        """Call `synchronize`, also after a step that a GradScaler has left out."""
        self._scaling.after_step()
        with torch.no_grad():
            self.synchronize()

    def common_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of what the group's first rank has, in new memory. Collective.

        What ranks count changes from is the same on all of them then, to the last bit, whatever their
        parameters and buffers are: the mean of the changes brings them together.
        """
        copies = {key: tensor.clone() for key, tensor in tensors.items()}
        group = self.training.group
        for device in dict.fromkeys(copy.device for copy in copies.values()):
            same = [copy for copy in copies.values() if copy.device == device]
            broadcast_coalesced(same, group.ranks[0], group)
        return copies

    def completed(self, kept: Mapping[str, Tensor]) -> list[Tensor]:
        """Return copies of what is kept for each parameter. Collective.

        Of parameters that were added after the last step, what all ranks will begin with.
        """
        tensors = self.tensors()
        added = self.common_copies({key: tensor for key, tensor in tensors.items() if key not in kept})
        return [added[key] if key in added else kept[key].clone() for key in tensors]
