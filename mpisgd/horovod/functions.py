"""Where Horovod keeps what starts ranks equal and moves objects: `horovod.torch.functions`."""

from mpisgd.horovod.objects import allgather_object, broadcast_object
from mpisgd.horovod.parameters import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
