"""Which cost model a job uses: a profile that someone has measured, or the built-in one."""

from pathlib import Path
from typing import TYPE_CHECKING

from mpisgd import config
from mpisgd.core.topology import Topology
from mpisgd.errors import InvalidArgument
from mpisgd.tuning.model import CostModel
from mpisgd.tuning.profile import ProfileError, built_in, default_path, read

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["find_costs"]


def find_costs(wire: "Communicator", topology: Topology) -> tuple[CostModel, str]:
    """Return the model of the job; and on rank 0 what to warn of, if anything.

    Collective: rank 0 reads, so that hosts with other files agree. The warning is left to the caller: where
    warnings are errors it may only come once a rank that fails ends the job.

    Raises:
        InvalidArgument: rank 0's MPISGD_PROFILE names a file that is not there; on every rank.
    """
    found: CostModel | InvalidArgument | None = None
    complaint = ""
    if wire.rank == 0:
        found, complaint = _look(topology.ranks_per_host)
    found = wire.broadcast_object(found, 0)
    if isinstance(found, InvalidArgument):
        raise found
    assert found is not None
    return found, complaint


def _look(ranks_per_host: tuple[int, ...]) -> tuple[CostModel | InvalidArgument, str]:
    """Return the model, or what is wrong with what was asked for; and what to warn of."""
    named = config.profile()
    fallback = built_in().at(ranks_per_host)
    if named == config.BUILT_IN_PROFILE:
        return fallback, ""
    path = Path(named) if named else default_path(ranks_per_host)
    try:
        return read(path).completed(fallback).at(ranks_per_host), ""
    except FileNotFoundError:
        if named:
            return InvalidArgument(f"MPISGD_PROFILE={named!r}: rank 0 finds no such file"), ""
        return fallback, ""
    except ProfileError as exc:
        return fallback, (
            f"the profile {path} cannot be used ({exc}); built-in values are used instead. Measure again "
            "with `python -m mpisgd tune`, or remove the file"
        )
