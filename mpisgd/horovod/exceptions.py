"""Horovod's exceptions."""

from mpisgd.errors import MpisgdError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(MpisgdError, RuntimeError):
    """An operation failed on all ranks that take part in it, or a rank was lost."""


class HostsUpdatedInterrupt(MpisgdError, RuntimeError):
    """Ranks have come or gone: an elastic program starts over from its last commit.

    Args:
        skip_sync: whether the state is known to be the same on all ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("ranks have come or gone")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(MpisgdError, ImportError):
    """Versions of an installation differ. Only for compatibility: mpisgd never raises it."""
