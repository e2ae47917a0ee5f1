"""The settings that mpisgd gives MPI, which must be in the environment before MPI starts; loads no torch."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from mpisgd import config
from mpisgd.cores import available_cores
from mpisgd.monitor import heartbeat

__all__ = ["mpi_defaults", "set_mpi_defaults"]

LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_")
SECURITY_VARIABLE = "PMIX_SECURITY_MODE"
FABRICS = ("infiniband", "cxi")  # device classes of Linux


def mpi_defaults(
    env: Mapping[str, str] = os.environ,
    *,
    cores: int | None = None,
    local_size: int | None = None,
    fabric: bool | None = None,
) -> dict[str, str]:
    """Return mpisgd's defaults for settings of MPI that the user has not set; for before MPI starts.

    - More ranks than cores on a host: waiting ranks yield their core. With Open MPI's default, spinning, an
      all-reduce was 15 times slower.
    - No one-sided windows over UCX: every window would print an error line.
    - With fault tolerance: a finalize without its barrier of all ranks ever started, which may wait for lost
      ones for ever; mpisgd has synchronized the others. Between hosts the heartbeats, see
      `mpisgd.monitor.heartbeat`.
    - On one host no TCP transport: it has no use there but listens on every address of the host.
    - Without a fabric such as InfiniBand no OFI transport: it would sleep for a second at the start.
    - Where Slurm's PMIx offers munge or PMIx's own security, the latter: an Open MPI without munge, such as
      the wheel's, would print that it lacks it.
    """
    cores = available_cores() if cores is None else cores
    local_size = config.launcher_local_size(env) if local_size is None else local_size
    wanted = {"OMPI_MCA_osc": "^ucx"}
    if local_size is not None and local_size > cores:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if config.fault_tolerance(env):
        wanted["OMPI_MCA_async_mpi_finalize"] = "1"
    if not _needs_network(env):
        wanted["OMPI_MCA_btl"] = "^tcp,ofi"
    elif not (_has_fabric() if fabric is None else fabric):
        wanted["OMPI_MCA_btl"] = "^ofi"
    wanted = {name: value for name, value in wanted.items() if name not in env}
    return wanted | _security(env) | heartbeat.settings(env)


def _security(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that replace the security modules that the launcher's PMIx chooses."""
    offered = env.get(SECURITY_VARIABLE, "").split(",")
    return {SECURITY_VARIABLE: "native"} if {"munge", "native"} <= set(offered) else {}


def _needs_network(env: Mapping[str, str]) -> bool:
    """Return whether Open MPI's ranks may have to reach each other by TCP.

    One host is certain only under Open MPI's own `mpirun`, or without a launcher. With fault tolerance,
    joiners may be spawned, and these use TCP on the same host too.
    """
    if not any(name.startswith(LAUNCHER_PREFIXES) for name in env):
        return False
    size, local_size = (env.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "LOCAL_SIZE"))
    return size is None or size != local_size or config.fault_tolerance(env)


def _has_fabric(devices: Path = Path("/sys/class")) -> bool:
    """Return whether this host has a fabric: InfiniBand, EFA, Slingshot."""
    return any(any((devices / kind).glob("*")) for kind in FABRICS)


def set_mpi_defaults(env: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Put `mpi_defaults` into the environment, which MPI reads when it starts; return what was set."""
    defaults = mpi_defaults(env)
    env.update(defaults)
    return defaults
