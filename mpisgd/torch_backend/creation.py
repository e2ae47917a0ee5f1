"""From what torch asks for to a store and a process group: which ranks of the job its members are."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

import mpisgd
from mpisgd import config
from mpisgd.core.consistency import Operation
from mpisgd.errors import InvalidArgument
from mpisgd.job.groups import open_group
from mpisgd.job.lifecycle import current_job
from mpisgd.torch_backend import compat
from mpisgd.torch_backend.membership import Membership, handle_of_process, keep_handles
from mpisgd.torch_backend.process_group import ProcessGroupMpisgd
from mpisgd.transport.tcp_store.store import open_store

__all__ = ["create", "mpi_rendezvous"]


def mpi_rendezvous(url: str) -> tuple[Any, int, int]:
    """Return (store, rank, world size) of this process, by way of MPI itself. Collective over the job.

    Args:
        url: as torch makes it of `init_method`, `rank` and `world_size`. Where it tells no rank, that of the
            environment counts (RANK, which another launcher may have set), else MPI's.
    """
    asked = {name: int(values[-1]) for name, values in parse_qs(urlparse(url).query).items()}
    job = current_job()
    rank, size = config.torchrun_rank()
    stores: list[Any] = []
    queue, where = job.world.queue, job.world.topology
    opening = Operation("open_store")
    queue.run(opening, lambda: stores.append(open_store(queue.communicator, where, job.timeout_s)))
    rank = asked.get("rank", job.world.rank if rank is None else rank)
    return stores[0], rank, asked.get("world_size", job.world.size if size is None else size)


def create(options: Any, pg_options: Any = None) -> ProcessGroupMpisgd:
    """Make the process group that torch describes. Collective over its members.

    Args:
        options: torch's _DistributedBackendOptions; `global_ranks_in_group` is empty for the default group.
        pg_options: of NCCL, as the program has given them.

    Raises:
        UnsupportedTorch: torch is older than the backend can live with.
        InvalidArgument: ranks that are not those of the job; on every rank that sees it. `pg_options` that
            are wrong; on every rank.
        CollectiveMismatch: the members gave different `pg_options`; on all of them.
    """
    compat.check_version()
    mpisgd.init()
    members = list(options.global_ranks_in_group or ())
    ranks = _job_ranks(members) if members else _agree_on_ranks(options)
    timeout_s = None if options.timeout == default_pg_timeout else options.timeout.total_seconds()
    membership = Membership(f"torch {options.group_id}", timeout_s, pg_options)
    if compat.wants_reconfigure(options):
        return ProcessGroupMpisgd(None, options.store, membership)
    group = open_group(
        current_job(),
        ranks,
        name=membership.name,
        timeout_s=timeout_s,
        runs_inline=True,
        pg_options=pg_options,
    )
    return ProcessGroupMpisgd(group, options.store, membership)


def _agree_on_ranks(options: Any) -> Sequence[int]:
    """Return the job's rank of every rank that torch counts, which the program may have ordered anew.

    Every rank learns the handles by which `reconfigure` names the others, too.
    """
    rank, size = options.group_rank, options.group_size
    if size != mpisgd.size():
        raise InvalidArgument(
            f"init_process_group: world_size={size}, but this job has {mpisgd.size()} rank(s): start the "
            f"program with mpirun -n {size}, or leave WORLD_SIZE and world_size to mpisgd"
        )
    told: list[Any] = [None] * size
    mpisgd.all_gather_object(told, (rank, handle_of_process(), compat.wants_reconfigure(options)))
    claims = [claim for claim, _, _ in told]
    wishes = [wants for _, _, wants in told]
    if len(set(wishes)) > 1:
        raise InvalidArgument(
            f"init_process_group: enable_reconfigure is {wishes} on the {size} ranks of the job; give all of "
            "them the same"
        )
    keep_handles(current_job(), [handle for _, handle, _ in told])
    if sorted(claims) != list(range(size)):
        raise InvalidArgument(
            f"init_process_group: the {size} ranks of the job call themselves {claims}; give every process a "
            "rank of its own, or leave RANK and rank to mpisgd"
        )
    return sorted(range(size), key=claims.__getitem__)


def _job_ranks(members: Sequence[int]) -> Sequence[int]:
    """Return the job's ranks of some of torch's."""
    default = distributed_c10d._get_default_group()
    if isinstance(default, ProcessGroupMpisgd):
        return [default.mpisgd_group.ranks[member] for member in members]
    if (dist.get_rank(), dist.get_world_size()) != (mpisgd.rank(), mpisgd.size()):
        raise InvalidArgument(
            f"new_group: the default group says rank {dist.get_rank()} of {dist.get_world_size()}, MPI says "
            f"rank {mpisgd.rank()} of {mpisgd.size()}; make the default group with the backend 'mpisgd' too"
        )
    return members
