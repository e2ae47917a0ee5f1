"""PyTorch Lightning under mpirun: importing this module makes `Trainer(strategy="mpisgd")` known.

Lightning asks for the numbers of processes and hosts and for a rendezvous address. mpirun has set the
numbers, and MPI is the rendezvous, so none of them needs to be given.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import mpisgd
from mpisgd import config
from mpisgd.errors import InvalidArgument
from mpisgd.job.mpi_settings import set_mpi_defaults
from mpisgd.torch_backend.plugin import BACKEND

__all__ = ["MpisgdEnvironment", "MpisgdStrategy"]


class MpisgdEnvironment(ClusterEnvironment):
    """Ranks and sizes from MPI; for `plugins=` beside one of Lightning's strategies.

    Lightning's MPIEnvironment uses mpi4py's COMM_WORLD and broadcasts an address and a port. This one also
    works with the communicator that `mpisgd.init()` was given.
    """

    creates_processes_externally = True
    # Lightning's strategies export these; the backend ignores them.
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return whether an MPI launcher has started this process."""
        return bool(config.torchrun_variables())

    def world_size(self) -> int:
        """Return the size of the job."""
        return mpisgd.size()

    def global_rank(self) -> int:
        """Return the rank in the job."""
        return mpisgd.rank()

    def local_rank(self) -> int:
        """Return the rank on this host."""
        return mpisgd.local_rank()

    def node_rank(self) -> int:
        """Return the rank of this host."""
        return mpisgd.node_rank()

    def set_world_size(self, size: int) -> None:
        """Do nothing: MPI sets the size."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: MPI sets the rank."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise InvalidArgument if `Trainer(devices=, num_nodes=)` differs from what mpirun has started."""
        if num_devices * num_nodes != mpisgd.size():
            raise _disagreement(f"devices={num_devices}, num_nodes={num_nodes}")


class MpisgdStrategy(DDPStrategy):
    """DistributedDataParallel over MPI, one process per rank; `Trainer(strategy="mpisgd")`.

    `devices` and `num_nodes` come from the job. The ranks of a host take its GPUs in turn, and share them if
    there are fewer GPUs.

    Args:
        options: DDPStrategy's, for example `find_unused_parameters=True`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(cluster_environment=MpisgdEnvironment(), process_group_backend=BACKEND, **options)

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return mpisgd.num_nodes()

    @num_nodes.setter
    def num_nodes(self, asked: int) -> None:
        if asked not in (1, mpisgd.num_nodes()):  # 1 is the Trainer's default
            raise _disagreement(f"num_nodes={asked}")

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """One device for each rank of this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, given: Sequence[torch.device] | None) -> None:
        num_ranks = mpisgd.local_size()
        if given and given[0].type == "cpu" and len(given) not in (1, num_ranks):  # 1, as above
            raise _disagreement(f"devices={len(given)}")
        self._parallel_devices = list(islice(cycle(given), num_ranks)) if given else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a DistributedSampler; hosts may have different numbers of ranks."""
        return {"num_replicas": mpisgd.size(), "rank": mpisgd.rank()}

    def setup_distributed(self) -> None:
        """Make the process group before Lightning does, which would print a line on every rank."""
        if not dist.is_initialized():
            dist.init_process_group(BACKEND, timeout=self._timeout)
        super().setup_distributed()

    def _configure_launcher(self) -> None:
        """There is nothing to launch."""


def _disagreement(asked: str) -> InvalidArgument:
    found = f"{mpisgd.size()} rank(s) on {mpisgd.num_nodes()} host(s), {mpisgd.local_size()} on this one"
    return InvalidArgument(f"Trainer: {asked}, but mpirun has started {found}; give those, or none")


# A Trainer with a strategy's name asks Lightning's MPIEnvironment first, which starts MPI.
set_mpi_defaults()
StrategyRegistry.register(BACKEND, MpisgdStrategy, description="DDP over MPI", override=True)
