"""The settings that mpisgd gives MPI, which must be in the environment before MPI starts; loads no torch."""

import os
from collections.abc import Mapping, MutableMapping

from mpisgd import config
from mpisgd.monitor import heartbeat

__all__ = ["mpi_defaults", "set_mpi_defaults"]


def mpi_defaults(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return all MPI settings that mpisgd wants and the user has not chosen."""
    return config.mpi_defaults(env) | heartbeat.settings(env)


def set_mpi_defaults(env: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Put `mpi_defaults` into the environment, which MPI reads when it starts; return what was set."""
    defaults = mpi_defaults(env)
    env.update(defaults)
    return defaults
