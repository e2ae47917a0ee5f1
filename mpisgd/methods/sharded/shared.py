"""`Shared`: a host has one copy of the parameters, of which each of its ranks updates its own pieces."""

from mpisgd.methods.sharded.piecewise import Piecewise
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.shared_parameters import SharedParameters

__all__ = ["Shared"]


class Shared(Piecewise):
    """Every host updates everything: its ranks divide that among themselves."""

    def _make_parameters(self, training: Training, *, elementwise: bool) -> DividedParameters:
        owners = Owners(training.group, of_host=True)
        groups = training.optimizer.param_groups
        return SharedParameters(training.named, groups, owners, elementwise=elementwise, joins=True)

    def _publish(self) -> None:
        self._parameters.barrier("updated")
