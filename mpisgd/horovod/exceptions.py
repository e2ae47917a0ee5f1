"""Horovod's exceptions."""

from mpisgd.errors import MpisgdError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(MpisgdError, RuntimeError):
    """An operation failed on all ranks that take part in it, or a rank was lost."""


class HostsUpdatedInterrupt(MpisgdError, RuntimeError):
    """Ranks have come or gone: an elastic program starts over from its last commit.

    Args:
        skip_sync: whether the state of all ranks is known to be alike.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("ranks have come or gone")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(MpisgdError, ImportError):
    """Parts of an installation do not fit; mpisgd has only one part and never raises it."""
