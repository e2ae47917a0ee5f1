"""What torch learns of mpisgd at its own import: the name of a backend, and a rendezvous handler.

An error here would be an error of `import torch`, in programs that never heard of mpisgd: nothing is raised.
Nothing else changes until a program names the backend; `mpisgd.shutdown()` undoes what changes then.
"""

import warnings
from collections.abc import Iterator
from typing import Any

from mpisgd.config import BACKEND

__all__ = ["BACKEND", "register"]

# Names of the backend for devices, as torch spells them; others want `init_method="mpi://"`.
WITH_DEVICES = (
    "cpu:mpisgd",
    "cuda:mpisgd",
    "cpu:mpisgd,cuda:mpisgd",
    "cpu:mpisgd,cuda:nccl",
    "cpu:gloo,cuda:mpisgd",
)


class _Name:
    """A name of the backend, as an attribute of `torch.distributed.Backend`.

    torch looks it up when a program names the backend, before it looks for the other ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> str:
        """Return the name, and let torch go on with our rendezvous and our barrier."""
        _take_over()
        return self._name


def register() -> None:
    """Register the backend "mpisgd" and `init_method="mpi://"`; the entry point calls this.

    Starts no MPI. A second call does nothing.
    """
    try:
        _register()
    except Exception as exc:
        warnings.warn(f"mpisgd could not register its torch.distributed backend: {exc!r}", RuntimeWarning, 2)


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    for name in (BACKEND, *WITH_DEVICES):
        setattr(dist.Backend, name.upper(), _Name(name))
    register_rendezvous_handler("mpi", _rendezvous)  # type: ignore[no-untyped-call]


_is_taken_over = False


def _take_over() -> None:
    """Change of torch what the backend needs, until `mpisgd.shutdown()`."""
    from mpisgd.job.process_changes import changes
    from mpisgd.torch_backend import compat

    global _is_taken_over
    if _is_taken_over:
        return
    _is_taken_over = True
    changes.callback(_note_given_back)
    compat.opt_out_of_flight_recorder(BACKEND)
    changes.callback(compat.take_over_rendezvous("env", BACKEND, _rendezvous))
    changes.callback(compat.take_over_monitored_barrier(_is_ours, _monitored_barrier))
    changes.callback(compat.keep_works_of_reducers())


def _is_ours(group: Any) -> bool:
    return hasattr(type(group), "mpisgd_group")


def _note_given_back() -> None:
    global _is_taken_over
    _is_taken_over = False


def _create(options: Any, pg_options: Any) -> Any:
    """Make a process group; torch calls this."""
    from mpisgd.torch_backend.creation import create

    return create(options, pg_options)


def _monitored_barrier(*args: Any, **kwargs: Any) -> None:
    """Wait for every rank of one of our groups; `torch.distributed.monitored_barrier` calls this."""
    from mpisgd.torch_backend.barrier import monitored_barrier

    monitored_barrier(*args, **kwargs)


def _rendezvous(url: str, **_: Any) -> "Iterator[tuple[Any, int, int]]":
    """Find the other ranks: yield (store, rank, world size); torch calls this."""
    from mpisgd.torch_backend.creation import mpi_rendezvous

    yield mpi_rendezvous(url)
