"""The rendezvous of a torch.distributed job that mpirun has started: through MPI itself."""

from typing import Any
from urllib.parse import parse_qs, urlparse

from mpisgd import config
from mpisgd.core.consistency import Operation
from mpisgd.job.lifecycle import current_job
from mpisgd.transport.tcp_store.store import open_store

__all__ = ["mpi_rendezvous"]


def mpi_rendezvous(url: str) -> tuple[Any, int, int]:
    """Return (store, rank, world size) of this process. Collective over the job.

    Args:
        url: as torch makes it of `init_method`, `rank` and `world_size`. Where it tells no rank, that of the
            environment counts (RANK, which another launcher may have set), else MPI's.
    """
    asked = {name: int(values[-1]) for name, values in parse_qs(urlparse(url).query).items()}
    job = current_job()
    rank, size = config.torchrun_rank()
    found: list[Any] = []
    communicator, where, limit_s = job.world.queue.communicator, job.world.topology, job.timeout_s
    job.world.queue.run(
        Operation("open_store"), lambda: found.append(open_store(communicator, where, limit_s))
    )
    return (
        found[0],
        asked.get("rank", job.world.rank if rank is None else rank),
        asked.get("world_size", job.world.size if size is None else size),
    )
